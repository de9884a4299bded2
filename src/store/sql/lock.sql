-- Lock the blocks that are still held, in the order of their ids: every transaction locks in the same order.
--
-- $1 block ids, $2 tokens. Without the lock a worker that lost its block could write beside the one that has it now. A statement
-- of its own: one that waits for the lock would not see an outcome that was committed meanwhile.
SELECT b.id
  FROM musterd.blocks b
  JOIN ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::uuid[])) AS u (id, token)
    ON u.id = b.id AND u.token = b.token
 -- Once more as an array: whatever the size of the table when this was planned, blocks are looked up.
 WHERE b.id = ANY ($1)
 ORDER BY b.id
   FOR UPDATE OF b

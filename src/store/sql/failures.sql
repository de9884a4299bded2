-- Insert the failures of blocks that are still held and have all the lines that are done.
--
-- By block: $1 ids, $2 tokens, $3 lines that are done. By failure: $4 slot, $5 line, $6 error.
INSERT INTO musterd.failures (batch_id, line, generation, attempt, error)
SELECT b.batch_id, f.line, b.generation, b.attempt, f.error
  FROM ROWS FROM (pg_catalog.unnest($4::int[]), pg_catalog.unnest($5::int[]), pg_catalog.unnest($6::text[])) AS f (slot, line, error)
  JOIN musterd.blocks b ON b.id = ($1::bigint[])[f.slot] AND b.token = ($2::uuid[])[f.slot] AND ($3::int4multirange[])[f.slot] <@ b.lines
 WHERE b.id = ANY ($1)

-- Take the lines that are done out of blocks that go on, if they are still held and have all of them. Answers with their slots.
--
-- $1 ids, $2 tokens, $3 lines that are done, $4 the slots they stand for.
UPDATE musterd.blocks b
   SET lines = b.lines - c.done,
       rows = (SELECT COALESCE(pg_catalog.sum(pg_catalog.upper(r) - pg_catalog.lower(r)), 0) FROM pg_catalog.unnest(b.lines - c.done) r)
  FROM ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::uuid[]), pg_catalog.unnest($3::int4multirange[]),
                  pg_catalog.unnest($4::int[])) AS c (id, token, done, slot)
 WHERE b.id = c.id AND b.id = ANY ($1) AND b.token = c.token AND c.done <@ b.lines
RETURNING c.slot

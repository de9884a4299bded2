-- Close blocks that are still held; their lines that want another try, or were not started, become free blocks.
--
-- $1 block ids, $2 tokens, $3 seconds until a retry is due (the slot of a block is its place here, from 1); then, by line:
-- $4 slot, $5 whether it is a retry, $6 line; $7 by block: an error for people to see while its retries wait. A retry is a further
-- attempt; a line given back is not.
WITH gone AS (
    DELETE FROM musterd.blocks b
     USING ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::uuid[]), pg_catalog.unnest($3::float8[]),
                      pg_catalog.unnest($7::text[]))
           WITH ORDINALITY AS c (id, token, wait, error, slot)
     WHERE b.id = c.id AND b.token = c.token
    RETURNING b.batch_id, b.queue, b.command, b.priority, b.attempt, b.crashes, b.solo, b.solo_crashes, c.wait, c.error,
              c.slot::int AS slot),
again AS (
    SELECT l.slot, l.retry, pg_catalog.array_agg(l.line ORDER BY l.line) AS lines, pg_catalog.min(l.line) AS first,
           pg_catalog.max(l.line) AS last
      FROM ROWS FROM (pg_catalog.unnest($4::int[]), pg_catalog.unnest($5::bool[]), pg_catalog.unnest($6::int[]))
           AS l (slot, retry, line)
     GROUP BY l.slot, l.retry)
INSERT INTO musterd.blocks (batch_id, first_line, last_line, lines, queue, command, priority, attempt, crashes, solo, solo_crashes,
                            error, available_at)
SELECT g.batch_id, a.first, a.last,
       CASE WHEN a.last - a.first + 1 = pg_catalog.cardinality(a.lines) THEN NULL ELSE a.lines END,
       g.queue, g.command, g.priority,
       CASE WHEN a.retry THEN g.attempt + 1 ELSE g.attempt END,
       g.crashes, g.solo, g.solo_crashes, CASE WHEN a.retry THEN g.error END,
       CASE WHEN NOT b.open THEN 'infinity' WHEN a.retry THEN pg_catalog.now() + pg_catalog.make_interval(secs => g.wait)
            ELSE pg_catalog.now() END
  FROM gone g
  JOIN again a ON a.slot = g.slot
  JOIN musterd.batches b ON b.id = g.batch_id

-- Single lines (retries, redrives), each cut out of its chunk by the server. $1 batch, $2 lines, $3 bytes: no further line once
-- those before it have about as many.
--
-- The lines are counted off before any chunk is read: one that cannot be read must not spoil a page without it. A line is taken
-- to have the average of its chunk, and a bit of the whole, in case that it is the large one.
SELECT w.line AS first_line, w.line AS last_line, pg_catalog.split_part(w.inputs, E'\n', w.line - w.first_line + 1) AS inputs
  FROM (SELECT l.line, c.first_line, c.inputs,
               pg_catalog.sum(c.bytes / (c.last_line - c.first_line + 1) + c.bytes / 16) OVER (ORDER BY l.line
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
          FROM (SELECT pg_catalog.generate_series(pg_catalog.lower(r), pg_catalog.upper(r) - 1) AS line
                  FROM pg_catalog.unnest($2::int4multirange) r) l
         CROSS JOIN LATERAL (
               SELECT d.first_line, d.last_line, d.inputs, pg_catalog.octet_length(d.inputs) AS bytes FROM musterd.chunks d
                WHERE d.batch_id = $1 AND d.first_line <= l.line ORDER BY d.first_line DESC LIMIT 1) c
        OFFSET 0) w
 WHERE w.before IS NULL OR w.before < $3::bigint
 ORDER BY w.line

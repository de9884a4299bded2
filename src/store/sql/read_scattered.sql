-- Single lines (retries, redrives), each cut out of its chunk by the server. $1 batch, $2 lines, $3 the most lines.
--
-- The lines are counted off before any chunk is read: one that cannot be read must not spoil a page without it.
SELECT l.line AS first_line, l.line AS last_line, pg_catalog.split_part(c.inputs, E'\n', l.line - c.first_line + 1) AS inputs
  FROM (SELECT pg_catalog.generate_series(pg_catalog.lower(r), pg_catalog.upper(r) - 1) AS line
          FROM pg_catalog.unnest($2::int4multirange) r
         ORDER BY 1
         LIMIT $3) l
 CROSS JOIN LATERAL (
       SELECT d.first_line, d.inputs FROM musterd.chunks d
        WHERE d.batch_id = $1 AND d.first_line <= l.line ORDER BY d.first_line DESC LIMIT 1) c
 ORDER BY l.line

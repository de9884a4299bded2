-- Whole chunks for lines that lie close together; the worker splits them. $1 batch, $2 first line, $3 last line, $4 bytes: no
-- further chunk once those before it have as many.
--
-- Sizes are read off the tuples: no chunk is read before it is known to fit.
SELECT w.first_line, w.last_line, w.inputs
  FROM (SELECT c.first_line, c.last_line, c.inputs,
               pg_catalog.sum(pg_catalog.octet_length(c.inputs)) OVER (ORDER BY c.first_line
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
          FROM musterd.chunks c
         WHERE c.batch_id = $1 AND c.first_line <= $3
           -- The chunk that holds the first line begins at or before it.
           AND c.first_line >= COALESCE((SELECT d.first_line FROM musterd.chunks d WHERE d.batch_id = $1 AND d.first_line <= $2
                                          ORDER BY d.first_line DESC LIMIT 1), 1)) w
 WHERE w.before IS NULL OR w.before < $4::bigint
 ORDER BY w.first_line

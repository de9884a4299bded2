-- Whole chunks for lines that lie close together; the worker splits them. $1 batch, $2 first line, $3 last line, $4 the most chunks.
SELECT c.first_line, c.last_line, c.inputs
  FROM musterd.chunks c
 WHERE c.batch_id = $1 AND c.first_line <= $3
   -- The chunk that holds the first line begins at or before it.
   AND c.first_line >= COALESCE((SELECT d.first_line FROM musterd.chunks d WHERE d.batch_id = $1 AND d.first_line <= $2
                                  ORDER BY d.first_line DESC LIMIT 1), 1)
 ORDER BY c.first_line
 LIMIT $4

-- The rows of a fresh block, none of which can have a result. $1 batch, $2 first line, $3 last line, $4 the most rows.
SELECT i.line, i.input
  FROM musterd.rows i
 WHERE i.batch_id = $1 AND i.line BETWEEN $2 AND $3
 ORDER BY i.line
 LIMIT $4

-- Rows that wait: those of free blocks, and those that the cursor has not reached.
--
-- $1 batch, $2 first line, $3 limit. Both are ranges of lines, so nothing is looked for among the finished.
WITH open AS MATERIALIZED (
    SELECT k.first_line, k.last_line, k.lines, k.attempt
      FROM musterd.blocks k
      JOIN musterd.batches b ON b.id = k.batch_id AND b.summarized_at IS NULL
     WHERE k.batch_id = $1 AND k.worker IS NULL AND k.last_line >= $2
    UNION ALL
    SELECT b.next_line, b.rows, NULL, NULL
      FROM musterd.batches b
     WHERE b.id = $1 AND b.summarized_at IS NULL AND b.next_line <= b.rows)
SELECT o.line, 'queued' AS state, k.attempt, NULL::text AS error, o.input, NULL::jsonb AS result,
       NULL::timestamptz AS finished_at
  FROM open k
 CROSS JOIN LATERAL (
       SELECT i.line, i.input FROM musterd.rows i
        WHERE i.batch_id = $1 AND i.line BETWEEN GREATEST(k.first_line, $2) AND k.last_line
          AND (k.lines IS NULL OR i.line = ANY (k.lines))
          AND NOT EXISTS (SELECT FROM musterd.results r WHERE r.batch_id = i.batch_id AND r.line = i.line)
        ORDER BY i.line LIMIT $3) o
 ORDER BY o.line LIMIT $3

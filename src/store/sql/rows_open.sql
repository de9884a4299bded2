-- Rows that run (the open lines of owned blocks) or wait (those of free blocks, and those that the cursor has not reached), from a
-- line on, as sets.
--
-- $1 batch, $2 first line, $3 the most rows, $4 running or queued. Of the blocks that begin behind the first line the $3 next are
-- enough: each has a line of its own. What is still open when an aborted batch has ended is aborted.
(SELECT $4::text AS state, NULL::int AS outcome, k.lines, k.attempt, NULL::text AS error, NULL::timestamptz AS finished_at,
        NULL::timestamptz AS started_at, NULL::real AS run_seconds
   FROM musterd.blocks k
   JOIN musterd.batches b ON b.id = k.batch_id AND b.summarized_at IS NULL
  WHERE k.batch_id = $1 AND (k.worker IS NOT NULL) = ($4 = 'running')
    AND pg_catalog.lower(k.lines) <= $2::int AND pg_catalog.upper(k.lines) > $2)
UNION ALL
(SELECT $4, NULL, k.lines, k.attempt, NULL, NULL, NULL, NULL
   FROM musterd.blocks k
   JOIN musterd.batches b ON b.id = k.batch_id AND b.summarized_at IS NULL
  WHERE k.batch_id = $1 AND (k.worker IS NOT NULL) = ($4 = 'running') AND pg_catalog.lower(k.lines) > $2
  ORDER BY pg_catalog.lower(k.lines) LIMIT $3::bigint)
UNION ALL
SELECT $4, NULL, pg_catalog.int4multirange(pg_catalog.int4range(b.next_line, b.rows + 1)) - COALESCE((
       -- A canary that is spread over the batch lies behind the cursor.
       SELECT pg_catalog.range_agg(x.lines)
         FROM (SELECT r.lines FROM musterd.recorded_lines r WHERE r.batch_id = $1 AND b.canary_only
               UNION ALL
               SELECT l FROM musterd.blocks k CROSS JOIN LATERAL pg_catalog.unnest(k.lines) l WHERE k.batch_id = $1 AND b.canary_only) x), '{}'),
       NULL, NULL, NULL, NULL, NULL
  FROM musterd.batches b
 WHERE b.id = $1 AND b.summarized_at IS NULL AND b.next_line <= b.rows AND $4 = 'queued'

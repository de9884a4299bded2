-- Rows that a batch ended without, from a line on, as sets: lines that have neither an outcome nor a failure.
--
-- $1 batch, $2 first line, $3 the most rows. Goes from stripe to stripe (10,000 lines) until there are enough.
WITH RECURSIVE b AS MATERIALIZED (
    SELECT b.rows FROM musterd.batches b WHERE b.id = $1 AND b.summarized_at IS NOT NULL AND b.aborted > 0),
walk (stripe, lines, found) AS (
    SELECT ($2::int - 1) / 10000 - 1, '{}'::int4multirange, 0 FROM b
    UNION ALL
    SELECT w.stripe + 1, m.lines, w.found + musterd.count_lines(m.lines)
      FROM walk w
     CROSS JOIN b
     CROSS JOIN LATERAL (
           SELECT pg_catalog.int4multirange(pg_catalog.int4range(
                      GREATEST((w.stripe + 1) * 10000 + 1, $2), LEAST((w.stripe + 2)::bigint * 10000, b.rows)::int + 1))
                  - COALESCE((SELECT pg_catalog.range_agg(l)
                                FROM musterd.outcomes o CROSS JOIN LATERAL pg_catalog.unnest(o.lines) l
                               WHERE o.batch_id = $1 AND o.first_line > 0
                                 AND o.first_line > (w.stripe + 1) * 10000 AND o.first_line <= (w.stripe + 2)::bigint * 10000), '{}')
                  - COALESCE((SELECT pg_catalog.range_agg(pg_catalog.int4range(f.line, f.line + 1))
                                FROM musterd.failures f
                               WHERE f.batch_id = $1 AND f.line > (w.stripe + 1) * 10000 AND f.line <= (w.stripe + 2)::bigint * 10000), '{}')
                  AS lines) m
     WHERE w.found < $3::bigint AND (w.stripe + 1) * 10000 < b.rows AND $2 <= b.rows)
SELECT 'aborted' AS state, NULL::int AS outcome, w.lines, NULL::int AS attempt, NULL::text AS error, NULL::timestamptz AS finished_at,
       NULL::timestamptz AS started_at, NULL::real AS run_seconds
  FROM walk w
 WHERE NOT pg_catalog.isempty(w.lines)

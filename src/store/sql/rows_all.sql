-- What is known about a page of lines, as sets: the page itself, then blocks, failures and outcomes, each over the one before.
--
-- $1 batch, $2 first line, $3 how many lines. Lines have no gaps, so a page is a range of them.
WITH b AS MATERIALIZED (
    SELECT b.summarized_at IS NULL AS goes_on,
           pg_catalog.int4range($2::int, LEAST($2::bigint + $3::bigint, b.rows + 1)::int) AS page
      FROM musterd.batches b
     WHERE b.id = $1 AND $2 <= b.rows)
SELECT 1 AS place, CASE WHEN b.goes_on THEN 'queued' ELSE 'aborted' END AS state, NULL::int AS outcome,
       pg_catalog.int4multirange(b.page) AS lines, NULL::int AS attempt, NULL::text AS error, NULL::timestamptz AS finished_at,
       NULL::timestamptz AS started_at, NULL::real AS run_seconds
  FROM b
UNION ALL
SELECT 2, CASE WHEN k.worker IS NULL THEN 'queued' ELSE 'running' END, NULL,
       k.lines * pg_catalog.int4multirange(b.page), k.attempt, NULL, NULL, NULL, NULL
  FROM b
  JOIN musterd.blocks k ON k.batch_id = $1 AND k.lines && b.page
 WHERE b.goes_on
UNION ALL
SELECT 3, 'failed', NULL, pg_catalog.int4multirange(pg_catalog.int4range(f.line, f.line + 1)), f.attempt, f.error, f.finished_at,
       f.started_at, f.run_seconds
  FROM b
  JOIN musterd.failures f ON f.batch_id = $1 AND f.line >= pg_catalog.lower(b.page) AND f.line < pg_catalog.upper(b.page)
UNION ALL
SELECT 4, 'succeeded', o.first_line, o.lines * pg_catalog.int4multirange(b.page), o.attempt, NULL, o.finished_at, o.started_at,
       o.run_seconds
  FROM b
  -- An outcome lies within one stripe of 10,000 lines: those of a page begin behind the start of its first stripe.
  JOIN musterd.outcomes o ON o.batch_id = $1 AND o.first_line > 0 AND o.first_line < pg_catalog.upper(b.page)
                         AND o.first_line > (pg_catalog.lower(b.page) - 1) / 10000 * 10000 AND o.lines && b.page
 ORDER BY place

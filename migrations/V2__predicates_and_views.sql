-- The questions that everything else asks, each written once, and what people look at.
--
-- Rule of this file: a question about one value is a function that the planner puts in the place of its call (no SET, one
-- expression), so an index on the same expression still serves. A question that needs other rows is a view, which the
-- planner takes apart, too. States of rows are derived, never stored; progress is a sum of outcomes, never a count of rows.

-- ------------------------------------------------------------------------------------------------------------ predicates

CREATE FUNCTION musterd.is_final(p_state musterd.state) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT p_state IN ('succeeded', 'failed', 'aborted')
$$;
COMMENT ON FUNCTION musterd.is_final(musterd.state) IS 'Whether a task or batch in this state has ended.';

CREATE FUNCTION musterd.is_unfinished(p_state musterd.state) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT p_state IN ('held', 'scheduled', 'queued', 'running', 'waiting')
$$;
COMMENT ON FUNCTION musterd.is_unfinished(musterd.state) IS
    'The opposite of is_final, in the form that the index of unfinished children has.';

CREATE FUNCTION musterd.is_alive(p_worker_state text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT p_worker_state IN ('alive', 'draining')
$$;
COMMENT ON FUNCTION musterd.is_alive(text) IS 'Whether a worker in this state may hold blocks and tasks.';

CREATE FUNCTION musterd.allowed_failures(p_rows int, p_max_failed int, p_percent real) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    -- real to numeric keeps the digits the user wrote; through float8 0.7 % of 1000 would be 6.
    SELECT COALESCE(pg_catalog.floor(p_rows * p_percent::numeric / 100)::bigint, p_max_failed::bigint)
$$;
COMMENT ON FUNCTION musterd.allowed_failures(int, int, real) IS 'How many rows of a batch may fail before it counts as failed.';

CREATE FUNCTION musterd.shown_state(p_state musterd.state, p_next_line int, p_generation int, p_aborting boolean) RETURNS musterd.state
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN p_state = 'running' AND p_next_line = 1 AND p_generation = 1 AND NOT p_aborting
                THEN 'queued'::musterd.state ELSE p_state END
$$;
COMMENT ON FUNCTION musterd.shown_state(musterd.state, int, int, boolean) IS
    'The state of a batch as people see it: queued as long as no line was claimed.';

CREATE VIEW musterd.paused_queues AS
SELECT q.name FROM musterd.queues q WHERE q.paused;
COMMENT ON VIEW musterd.paused_queues IS 'The queues of which nothing is claimed.';

CREATE VIEW musterd.batches_over AS
SELECT b.*
  FROM musterd.batches b
 WHERE b.summarized_at IS NULL
   AND (b.aborting OR (b.open AND b.next_line > b.rows))
   AND NOT EXISTS (SELECT FROM musterd.blocks k WHERE k.batch_id = b.id AND (k.worker IS NOT NULL OR NOT b.aborting));
COMMENT ON VIEW musterd.batches_over IS
    'Batches in which nothing can change any more and which were not ended yet: every line was claimed and no block is left. '
    'The free blocks of one that is being aborted do not count; the end drops them.';

CREATE VIEW musterd.parents_over AS
SELECT p.*
  FROM musterd.tasks p
 WHERE p.state = 'waiting'
   AND NOT EXISTS (SELECT FROM musterd.tasks c WHERE c.parent_id = p.id AND musterd.is_unfinished(c.state));
COMMENT ON VIEW musterd.parents_over IS 'Tasks that wait for children of which none is left, and which were not ended yet.';

-- ------------------------------------------------------------------------------------------------------- sets of lines

CREATE FUNCTION musterd.count_lines(p_lines int4multirange) RETURNS int
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT COALESCE(pg_catalog.sum(pg_catalog.upper(r) - pg_catalog.lower(r)), 0)::int FROM pg_catalog.unnest(p_lines) r
$$;
COMMENT ON FUNCTION musterd.count_lines(int4multirange) IS 'The number of lines in a set.';

CREATE FUNCTION musterd.lines_of(p_lines int4multirange) RETURNS SETOF int
LANGUAGE sql IMMUTABLE PARALLEL SAFE ROWS 100 AS $$
    SELECT pg_catalog.generate_series(pg_catalog.lower(r), pg_catalog.upper(r) - 1) FROM pg_catalog.unnest(p_lines) r
$$;
COMMENT ON FUNCTION musterd.lines_of(int4multirange) IS 'The lines of a set, one by one and in order.';

CREATE FUNCTION musterd.line_set(p_lines int[]) RETURNS int4multirange
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT COALESCE(pg_catalog.range_agg(pg_catalog.int4range(l, l + 1)), '{}') FROM pg_catalog.unnest(p_lines) l
$$;
COMMENT ON FUNCTION musterd.line_set(int[]) IS 'The set of these lines.';

-- ------------------------------------------------------------------------------------------------------ rows and results

CREATE VIEW musterd.rows AS
SELECT c.batch_id, c.first_line + t.n::int - 1 AS line, t.input::jsonb AS input
  FROM musterd.chunks c
 CROSS JOIN LATERAL pg_catalog.string_to_table(c.inputs, E'\n') WITH ORDINALITY t (input, n);
COMMENT ON VIEW musterd.rows IS
    'The input of every row. For whole batches; single lines and pages are much cheaper through batch_row and batch_rows.';

CREATE VIEW musterd.results AS
SELECT o.batch_id, z.line, 'succeeded'::musterd.state AS state, o.attempt, NULLIF(z.result, '')::jsonb AS result,
       NULL::text AS error, NULLIF(z.outputs, '')::jsonb AS outputs, o.finished_at
  FROM musterd.outcomes o
 CROSS JOIN LATERAL ROWS FROM (musterd.lines_of(o.lines), pg_catalog.string_to_table(o.results, E'\n'),
                               pg_catalog.string_to_table(o.outputs, E'\n')) AS z (line, result, outputs)
 WHERE o.first_line > 0
UNION ALL
SELECT f.batch_id, f.line, 'failed'::musterd.state, f.attempt, NULL::jsonb, f.error, NULL::jsonb, f.finished_at
  FROM musterd.failures f;
COMMENT ON VIEW musterd.results IS
    'What became of every row that has ended. Aborted rows have no result. For whole batches; single lines and pages are much '
    'cheaper through batch_row and batch_rows.';

CREATE FUNCTION musterd.chunks_of(p_batch bigint, p_from int, p_to int) RETURNS SETOF musterd.chunks
LANGUAGE sql STABLE PARALLEL SAFE ROWS 2 AS $$
    SELECT c.* FROM musterd.chunks c
     WHERE c.batch_id = p_batch AND c.first_line <= p_to
       -- The chunk that holds the first line begins at or before it, however long it is.
       AND c.first_line >= COALESCE((SELECT d.first_line FROM musterd.chunks d WHERE d.batch_id = p_batch AND d.first_line <= p_from
                                      ORDER BY d.first_line DESC LIMIT 1), 1)
     ORDER BY c.first_line
$$;
COMMENT ON FUNCTION musterd.chunks_of(bigint, int, int) IS 'The chunks that hold lines p_from to p_to, in order.';

CREATE FUNCTION musterd.batch_rows(p_batch bigint, p_from int DEFAULT 1, p_to int DEFAULT 2000000000)
RETURNS TABLE (line int, state musterd.state, attempt int, input json, result json, error text, outputs json, finished_at timestamptz)
LANGUAGE sql STABLE ROWS 500 SET search_path = pg_catalog, pg_temp SET jit = off AS $$
    WITH b AS MATERIALIZED (
        SELECT b.summarized_at, int4range(GREATEST(p_from, 1), LEAST(p_to, b.rows) + 1) AS page
          FROM musterd.batches b
         WHERE b.id = p_batch AND p_from <= b.rows AND p_to >= 1 AND p_from <= p_to),
    i AS MATERIALIZED (
        SELECT c.first_line + t.n::int - 1 AS line, t.input
          FROM b
         CROSS JOIN LATERAL musterd.chunks_of(p_batch, lower(b.page), upper(b.page) - 1) c
         CROSS JOIN LATERAL string_to_table(c.inputs, E'\n') WITH ORDINALITY t (input, n)
         WHERE c.first_line + t.n::int - 1 <@ b.page),
    o AS MATERIALIZED (
        SELECT z.line, o.attempt, z.result, z.outputs, o.finished_at
          FROM b
          -- An outcome lies within one stripe of 10,000 lines: those of a page begin behind the start of its first stripe.
          JOIN musterd.outcomes o ON o.batch_id = p_batch AND o.first_line > 0 AND o.first_line < upper(b.page)
                                 AND o.first_line > (lower(b.page) - 1) / 10000 * 10000 AND o.lines && b.page
         CROSS JOIN LATERAL ROWS FROM (musterd.lines_of(o.lines), string_to_table(o.results, E'\n'),
                                       string_to_table(o.outputs, E'\n')) AS z (line, result, outputs)
         WHERE z.line <@ b.page),
    k AS MATERIALIZED (
        SELECT l.line, k.attempt, k.worker IS NOT NULL AS owned
          FROM b
          JOIN musterd.blocks k ON k.batch_id = p_batch AND k.lines && b.page
         CROSS JOIN LATERAL musterd.lines_of(k.lines * int4multirange(b.page)) l (line)
         WHERE b.summarized_at IS NULL)
    SELECT i.line,
           CASE WHEN o.line IS NOT NULL THEN 'succeeded'
                WHEN f.line IS NOT NULL THEN 'failed'
                WHEN b.summarized_at IS NOT NULL THEN 'aborted'
                WHEN k.owned THEN 'running'
                ELSE 'queued' END::musterd.state,
           COALESCE(o.attempt, f.attempt, k.attempt), i.input::json, NULLIF(o.result, '')::json, f.error,
           NULLIF(o.outputs, '')::json, COALESCE(o.finished_at, f.finished_at)
      FROM b
     CROSS JOIN i
      LEFT JOIN o ON o.line = i.line
      LEFT JOIN musterd.failures f ON f.batch_id = p_batch AND f.line = i.line
                                  AND f.line >= lower(b.page) AND f.line < upper(b.page)
      LEFT JOIN k ON k.line = i.line
     ORDER BY i.line
$$;
COMMENT ON FUNCTION musterd.batch_rows(bigint, int, int) IS
    'A page of a batch: lines p_from to p_to in order, each with its input as it was submitted, its state and what became of it. '
    'The state is the outcome''s; else aborted if the batch has ended; else running if an owned block has the line; else queued. '
    'attempt is the one that ended, is running or comes next; null for a line that was never claimed.';

CREATE FUNCTION musterd.batch_row(p_batch bigint, p_line int)
RETURNS TABLE (line int, state musterd.state, attempt int, input json, result json, error text, outputs json, finished_at timestamptz)
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT * FROM musterd.batch_rows(p_batch, p_line, p_line)
$$;
COMMENT ON FUNCTION musterd.batch_row(bigint, int) IS 'One line of a batch, as batch_rows shows it; no row when there is no such line.';

-- -------------------------------------------------------------------------------------------------------------- progress

CREATE VIEW musterd.batch_progress AS
SELECT b.id,
       musterd.shown_state(t.state, b.next_line, b.generation, b.aborting) AS state,
       b.rows,
       GREATEST(b.rows - d.succeeded - d.failed - h.running - e.aborted, 0) AS queued,
       h.running,
       d.succeeded,
       d.failed,
       e.aborted,
       b.aborting,
       b.generation,
       b.queue,
       b.command,
       b.priority,
       t.parent_id,
       t.created_at,
       t.finished_at,
       b.outputs
  FROM musterd.batches b
  JOIN musterd.tasks t ON t.id = b.id
 CROSS JOIN LATERAL (
      SELECT COALESCE(b.succeeded, sum(o.succeeded), 0)::int AS succeeded,
             COALESCE(b.failed, sum(o.failed) FILTER (WHERE o.generation = b.generation), 0)::int AS failed
        FROM musterd.outcomes o
       -- BETWEEN, not =, is for the planner: it then expects few of them and goes through the index. With = and few
       -- batches it reads the outcomes of all, for each of them.
       WHERE o.batch_id BETWEEN b.id AND b.id AND b.summarized_at IS NULL) d
 CROSS JOIN LATERAL (
      SELECT COALESCE(sum(k.rows), 0)::int AS running
        FROM musterd.blocks k
       WHERE k.batch_id = b.id AND k.worker IS NOT NULL AND b.summarized_at IS NULL) h
 CROSS JOIN LATERAL (SELECT COALESCE(b.aborted, 0) AS aborted) e;
COMMENT ON VIEW musterd.batch_progress IS
    'One line per batch: state and counts. While it runs the counts come from outcomes and blocks, after its end from the '
    'summary. queued is what is left; state is queued as long as no line was ever claimed.';

CREATE VIEW musterd.recorded_lines AS
    SELECT o.batch_id, (o.first_line - 1) / 10000 AS stripe, l.lines, true AS succeeded
      FROM musterd.outcomes o CROSS JOIN LATERAL unnest(o.lines) l (lines) WHERE o.first_line > 0
    UNION ALL
    SELECT f.batch_id, (f.line - 1) / 10000, int4range(f.line, f.line + 1), false
      FROM musterd.failures f;
COMMENT ON VIEW musterd.recorded_lines IS
    'Which lines of a batch have an outcome, as ranges; none of them crosses a multiple of 10,000 (its stripe). Ask for one batch.';

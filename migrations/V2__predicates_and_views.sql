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

CREATE FUNCTION musterd.is_open(p_state musterd.state) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT COALESCE(p_state, 'held') = 'queued'
$$;
COMMENT ON FUNCTION musterd.is_open(musterd.state) IS
    'Whether the record of a task says that it was not run to its end yet, in the form that the index of such tasks has.';

CREATE FUNCTION musterd.is_alive(p_worker_state text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT p_worker_state IN ('alive', 'draining')
$$;
COMMENT ON FUNCTION musterd.is_alive(text) IS 'Whether a worker in this state may hold blocks and tasks.';

CREATE FUNCTION musterd.acts_as(p_role text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    -- A role that was never made has no members.
    SELECT COALESCE(pg_catalog.pg_has_role(musterd.caller()::pg_catalog.name, pg_catalog.to_regrole(p_role)::pg_catalog.oid, 'USAGE'), false)
$$;
COMMENT ON FUNCTION musterd.acts_as(text) IS 'Internal: whether the caller has the rights of a role.';

CREATE FUNCTION musterd.steers_all() RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT musterd.acts_as('musterd_worker') OR musterd.acts_as('musterd_operator')
        OR pg_catalog.pg_has_role(musterd.caller()::pg_catalog.name,
                                  (SELECT n.nspowner FROM pg_catalog.pg_namespace n WHERE n.nspname OPERATOR(pg_catalog.=) 'musterd'), 'USAGE')
$$;
COMMENT ON FUNCTION musterd.steers_all() IS
    'Whether the caller may steer what others submitted: members of musterd_worker and musterd_operator, and the owner of the schema.';

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

-- ----------------------------------------------------------------------------------------------------------------- tasks

CREATE FUNCTION musterd.task_ids(p_tasks int8multirange) RETURNS SETOF bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE ROWS 100 AS $$
    SELECT pg_catalog.generate_series(pg_catalog.lower(r), pg_catalog.upper(r) - 1) FROM pg_catalog.unnest(p_tasks) r
$$;
COMMENT ON FUNCTION musterd.task_ids(int8multirange) IS 'The ids of a set of tasks, one by one and in order.';

CREATE FUNCTION musterd.id_set(p_ids bigint[]) RETURNS int8multirange
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    -- A range for each run of ids, not for each id: aggregating ranges is what costs.
    SELECT COALESCE(pg_catalog.range_agg(pg_catalog.int8range(r.first, r.last + 1)), '{}')
      FROM (SELECT pg_catalog.min(i.id) AS first, pg_catalog.max(i.id) AS last
              FROM (SELECT u AS id, u - pg_catalog.row_number() OVER (ORDER BY u) AS run FROM pg_catalog.unnest(p_ids) u) i
             GROUP BY i.run) r
$$;
COMMENT ON FUNCTION musterd.id_set(bigint[]) IS 'The set of these ids.';

-- One table in FROM and everything else computed: so the server passes an INSERT on to the table as it is, whole sets of rows at
-- a time. There are few claims, so that each can be looked at.
CREATE VIEW musterd.tasks AS
SELECT r.id, r.parent_id, r.queue, r.command, r.payload, r.priority,
       CASE WHEN r.state <> 'queued' THEN r.state
            WHEN EXISTS (SELECT FROM musterd.task_claims k WHERE k.tasks @> r.id AND k.number = r.ticket) THEN 'running'
            WHEN r.run_at > statement_timestamp() THEN 'scheduled'
            ELSE 'queued' END::musterd.state AS state,
       r.attempt, r.max_attempts, r.crashes, r.solo_crashes,
       (SELECT k.alone_at FROM musterd.task_claims k WHERE r.state = 'queued' AND k.tasks @> r.id AND k.number = r.ticket LIMIT 1) AS alone_at,
       r.run_at, r.not_before, r.timeout, r.dedup_key, r.idempotency_key, r.child_key, r.on_child_failure, r.aborting,
       (SELECT k.worker FROM musterd.task_claims k WHERE r.state = 'queued' AND k.tasks @> r.id AND k.number = r.ticket LIMIT 1) AS worker,
       COALESCE((SELECT k.claimed_at FROM musterd.task_claims k
                  WHERE r.state = 'queued' AND k.tasks @> r.id AND k.number = r.ticket LIMIT 1), r.claimed_at) AS claimed_at,
       r.result, r.error, r.created_at, r.finished_at, r.traceparent, r.submitted_by, r.data_gone_at
  FROM musterd.task_records r;
COMMENT ON VIEW musterd.tasks IS
    'Units of work and scopes, with their states as people see them. A batch is a task that has a row in batches; it is never '
    'claimed as a task. INSERT INTO musterd.tasks (command, payload) is all a producer needs.';
DO $$
DECLARE
    v_column record;
BEGIN
    FOR v_column IN
        SELECT v.attname, col_description(t.attrelid, t.attnum) AS words
          FROM pg_attribute v JOIN pg_attribute t ON t.attrelid = 'musterd.task_records'::regclass AND t.attname = v.attname
         WHERE v.attrelid = 'musterd.tasks'::regclass AND v.attnum > 0 AND col_description(t.attrelid, t.attnum) IS NOT NULL
    LOOP
        EXECUTE format('COMMENT ON COLUMN musterd.tasks.%I IS %L', v_column.attname, v_column.words);
    END LOOP;
END $$;
COMMENT ON COLUMN musterd.tasks.state IS
    'queued, scheduled (not due yet, or waiting for a retry or for other tasks), running; the others as they are stored. Of a '
    'batch: held, or running from submit to end.';
COMMENT ON COLUMN musterd.tasks.alone_at IS 'Since when its holder runs it with nothing else beside it.';
COMMENT ON COLUMN musterd.tasks.worker IS 'The worker that holds it now. Null for batches and for everything that is not running.';
COMMENT ON COLUMN musterd.tasks.claimed_at IS 'The latest claim.';

CREATE FUNCTION musterd.children_by_state(p_task_id bigint) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT COALESCE(pg_catalog.jsonb_object_agg(c.state::text, c.number), '{}')
      FROM (SELECT t.state, pg_catalog.count(*) AS number FROM musterd.tasks t WHERE t.parent_id = p_task_id GROUP BY t.state) c
$$;
COMMENT ON FUNCTION musterd.children_by_state(bigint) IS
    'How many children a task has in each state, as {"queued": 2, "succeeded": 1}; states that none is in are left out.';

CREATE VIEW musterd.paused_queues AS
SELECT q.name FROM musterd.queues q WHERE q.paused;
COMMENT ON VIEW musterd.paused_queues IS 'The queues of which nothing is claimed.';

CREATE VIEW musterd.batches_over AS
SELECT b.*
  FROM musterd.batches b
 WHERE b.summarized_at IS NULL
   AND (b.aborting OR (b.open AND b.next_line > b.rows AND NOT b.canary_only))
   AND NOT EXISTS (SELECT FROM musterd.blocks k WHERE k.batch_id = b.id AND (k.worker IS NOT NULL OR NOT b.aborting));
COMMENT ON VIEW musterd.batches_over IS
    'Batches in which nothing can change any more and which were not ended yet: every line was claimed and no block is left. '
    'The free blocks of one that is being aborted do not count; the end drops them.';

CREATE VIEW musterd.canaries_over AS
SELECT b.*
  FROM musterd.batches b
 WHERE b.summarized_at IS NULL AND b.canary_only AND b.canary_report IS NULL AND NOT b.aborting
   AND NOT EXISTS (SELECT FROM musterd.blocks k WHERE k.batch_id = b.id);
COMMENT ON VIEW musterd.canaries_over IS 'Batches whose canary has ended, and was not judged yet.';

CREATE VIEW musterd.parents_over AS
SELECT p.*
  FROM musterd.task_records p
 WHERE p.state = 'waiting'
   AND NOT EXISTS (SELECT FROM musterd.task_records c WHERE c.parent_id = p.id AND musterd.is_unfinished(c.state));
COMMENT ON VIEW musterd.parents_over IS 'Tasks that wait for children of which none is left, and which were not ended yet.';

CREATE VIEW musterd.parents_aborting AS
SELECT p.id
  FROM musterd.task_records p
 WHERE p.state = 'waiting'
   AND EXISTS (SELECT FROM musterd.task_records c JOIN musterd.batches b ON b.id = c.id
                WHERE c.parent_id = p.id AND musterd.is_unfinished(c.state) AND NOT b.aborting)
   AND (p.aborting OR (p.on_child_failure = 'abort_siblings'
                       AND EXISTS (SELECT FROM musterd.task_records c WHERE c.parent_id = p.id AND c.state IN ('failed', 'aborted'))));
COMMENT ON VIEW musterd.parents_aborting IS
    'Tasks whose children are to be aborted, with child batches that still run: another transaction had them locked.';

CREATE VIEW musterd.uncles_ready AS
SELECT u.id
  FROM musterd.task_records u
 WHERE u.not_before IS NOT NULL AND u.state IN ('queued', 'held')
   AND NOT EXISTS (SELECT FROM musterd.task_waits w JOIN musterd.task_records t ON t.id = w.after_id
                    WHERE w.task_id = u.id AND NOT musterd.is_final(t.state));
COMMENT ON VIEW musterd.uncles_ready IS 'Uncles whose dependencies have all ended, and which were not started yet.';

-- -------------------------------------------------------------------------------------------------------------- retention

CREATE FUNCTION musterd.retention_of(p_queue text, p_command text, p_state musterd.state) RETURNS TABLE (data interval, records interval)
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT g.data, GREATEST(g.data, g.records)
      FROM (SELECT COALESCE((SELECT r.data FROM musterd.retention_rules r
                              WHERE r.data IS NOT NULL AND (r.queue IS NULL OR r.queue = p_queue)
                                AND (r.command IS NULL OR r.command = p_command) AND (r.state IS NULL OR r.state = p_state)
                              ORDER BY pg_catalog.num_nonnulls(r.queue, r.command, r.state) DESC, r.data DESC LIMIT 1), d.data) AS data,
                   COALESCE((SELECT r.records FROM musterd.retention_rules r
                              WHERE r.records IS NOT NULL AND (r.queue IS NULL OR r.queue = p_queue)
                                AND (r.command IS NULL OR r.command = p_command) AND (r.state IS NULL OR r.state = p_state)
                              ORDER BY pg_catalog.num_nonnulls(r.queue, r.command, r.state) DESC, r.records DESC LIMIT 1), d.records) AS records
              FROM musterd.retention d) g
$$;
COMMENT ON FUNCTION musterd.retention_of(text, text, musterd.state) IS
    'How long the data and the record of work that ended in this state stay. No row: no worker has declared it, and everything stays.';

CREATE FUNCTION musterd.shortest_retention() RETURNS interval
LANGUAGE sql STABLE AS $$
    SELECT LEAST(d.data, d.records, d.held, (SELECT pg_catalog.min(LEAST(r.data, r.records)) FROM musterd.retention_rules r))
      FROM musterd.retention d
$$;
COMMENT ON FUNCTION musterd.shortest_retention() IS 'The shortest time that any of the rules names; null: nothing is declared.';

CREATE VIEW musterd.batches_to_prune AS
SELECT b.id, b.uid, b.generation, b.rows, b.command, b.queue, b.data_gone_at, e.ended_at,
       CASE WHEN r.records < interval '9000 years' THEN e.ended_at + r.records END AS record_until
  FROM musterd.batches b
  JOIN musterd.task_records t ON t.id = b.id
  LEFT JOIN musterd.task_records p ON p.id = t.parent_id
 CROSS JOIN LATERAL (SELECT GREATEST(b.summarized_at, p.finished_at) AS ended_at) e
 CROSS JOIN LATERAL musterd.retention_of(b.queue, b.command, t.state) r
 WHERE b.summarized_at IS NOT NULL AND NOT b.data_deleted
   AND (b.data_gone_at IS NOT NULL
        OR (NOT b.data_held
            AND (p.id IS NULL OR musterd.is_final(p.state))
            AND e.ended_at + COALESCE(b.keep, r.data) <= pg_catalog.now()
            AND NOT EXISTS (SELECT FROM musterd.task_waits w WHERE w.after_id IN (b.id, p.id))));
COMMENT ON VIEW musterd.batches_to_prune IS
    'Batches whose rows may go, and those whose rows are going (data_gone_at). Not before the scope that they belong to has ended, and not '
    'while a task waits for one of the two.';

CREATE VIEW musterd.trees_to_prune AS
SELECT t.id,
       t.finished_at + r.records <= pg_catalog.now()
           AND NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = t.id AND NOT b.data_deleted)
           AND NOT EXISTS (SELECT FROM musterd.task_records c
                            WHERE c.parent_id = t.id
                              AND (NOT musterd.is_final(c.state)
                                   OR EXISTS (SELECT FROM musterd.task_waits w WHERE w.after_id = c.id)
                                   OR EXISTS (SELECT FROM musterd.batches b WHERE b.id = c.id AND NOT b.data_deleted))) AS whole
  FROM musterd.task_records t
 CROSS JOIN LATERAL musterd.retention_of(t.queue, t.command, t.state) r
 WHERE t.parent_id IS NULL AND musterd.is_final(t.state)
   AND t.finished_at + r.data <= pg_catalog.now()
   AND NOT EXISTS (SELECT FROM musterd.task_waits w WHERE w.after_id = t.id);
COMMENT ON VIEW musterd.trees_to_prune IS
    'Top-level tasks whose bodies may go, with those of their children; whole: their records, too. A tree goes by the queue, command, '
    'state and end of its top-level task. Not while a task waits for it. Ask for given ids.';

CREATE FUNCTION musterd.data_is_gone(p_id bigint) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_batch musterd.batches;
BEGIN
    SELECT b.* INTO v_batch FROM musterd.batches b WHERE b.id = p_id;
    IF v_batch.data_gone_at IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'MU410',
            MESSAGE = concat(format('the data of batch %s went on %s; its record stays ', p_id, v_batch.data_gone_at::timestamptz(0)),
                             COALESCE('until ' || v_batch.record_until::timestamptz(0)::text, 'for ever'),
                             '; its rows are archived in ' || (v_batch.archive ->> 'location'));
    END IF;
    RETURN false;
END $$;
COMMENT ON FUNCTION musterd.data_is_gone(bigint) IS
    'Internal: raises MU410 when the rows of this batch went with retention, and says when and where the archive is; else false.';

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

CREATE FUNCTION musterd.error_group_name(p_group int) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT pg_catalog.lpad(pg_catalog.to_hex(p_group), 8, '0')
$$;
COMMENT ON FUNCTION musterd.error_group_name(int) IS 'A group of errors as people see it: eight hexadecimal digits.';

CREATE FUNCTION musterd.error_group_of(p_name text) RETURNS int
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_name !~ '^[0-9A-Fa-f]{8}$' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('"%s" is no group of errors', left(p_name, 100)),
            HINT = 'It is eight hexadecimal digits, as musterd.batch_errors shows them.';
    END IF;
    RETURN ('x' || p_name)::bit(32)::int;
END $$;
COMMENT ON FUNCTION musterd.error_group_of(text) IS 'The group of errors with this name.';

CREATE VIEW musterd.results AS
SELECT o.batch_id, z.line, 'succeeded'::musterd.state AS state, o.attempt, NULLIF(z.result, '')::jsonb AS result,
       NULL::text AS error, NULLIF(z.outputs, '')::jsonb AS outputs, o.finished_at, o.started_at, o.run_seconds,
       NULL::text AS error_group, NULL::text AS error_code
  FROM musterd.outcomes o
 CROSS JOIN LATERAL ROWS FROM (musterd.lines_of(o.lines), pg_catalog.string_to_table(o.results, E'\n'),
                               pg_catalog.string_to_table(o.outputs, E'\n')) AS z (line, result, outputs)
 WHERE o.first_line > 0
UNION ALL
SELECT f.batch_id, f.line, 'failed'::musterd.state, f.attempt, f.result::jsonb, f.error, f.outputs::jsonb, f.finished_at, f.started_at,
       f.run_seconds, musterd.error_group_name(f.error_group), f.error_code
  FROM musterd.failures f;
COMMENT ON VIEW musterd.results IS
    'What became of every row that has ended. Aborted rows have no result. started_at and run_seconds are those of the rows that were '
    'written together: when the first of them started, and how long one ran on average. For whole batches; single lines and pages are much '
    'cheaper through batch_row and batch_rows.';

CREATE FUNCTION musterd.may_see(p_id bigint) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN musterd.steers_all() OR musterd.acts_as('musterd_observer')
        OR EXISTS (SELECT FROM musterd.task_records t WHERE t.id = p_id AND t.submitted_by = musterd.caller());
END $$;
COMMENT ON FUNCTION musterd.may_see(bigint) IS 'Whether the caller may read a task or batch: all that it submitted, or, by its role, all.';

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
RETURNS TABLE (line int, state musterd.state, attempt int, input json, result json, error text, outputs json, finished_at timestamptz,
               started_at timestamptz, run_seconds real, error_group text, error_code text)
LANGUAGE sql STABLE SECURITY DEFINER ROWS 500 SET search_path = pg_catalog, pg_temp SET jit = off AS $$
    WITH b AS MATERIALIZED (
        SELECT b.summarized_at, int4range(GREATEST(p_from, 1), LEAST(p_to, b.rows) + 1) AS page
          FROM musterd.batches b
         WHERE b.id = p_batch AND p_from <= b.rows AND p_to >= 1 AND p_from <= p_to
           AND CASE WHEN musterd.may_see(p_batch) THEN b.data_gone_at IS NULL OR NOT musterd.data_is_gone(p_batch) ELSE false END),
    i AS MATERIALIZED (
        SELECT c.first_line + t.n::int - 1 AS line, t.input
          FROM b
         CROSS JOIN LATERAL musterd.chunks_of(p_batch, lower(b.page), upper(b.page) - 1) c
         CROSS JOIN LATERAL string_to_table(c.inputs, E'\n') WITH ORDINALITY t (input, n)
         WHERE c.first_line + t.n::int - 1 <@ b.page),
    o AS MATERIALIZED (
        SELECT z.line, o.attempt, z.result, z.outputs, o.finished_at, o.started_at, o.run_seconds
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
           COALESCE(o.attempt, f.attempt, k.attempt), i.input::json, COALESCE(NULLIF(o.result, '')::json, f.result), f.error,
           COALESCE(NULLIF(o.outputs, '')::json, f.outputs), COALESCE(o.finished_at, f.finished_at), COALESCE(o.started_at, f.started_at),
           COALESCE(o.run_seconds, f.run_seconds), musterd.error_group_name(f.error_group), f.error_code
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
    'attempt is the one that ended, is running or comes next; null for a line that was never claimed. Of a batch that the caller '
    'may not read there are no lines. MU410 when retention has taken them.';

CREATE FUNCTION musterd.batch_row(p_batch bigint, p_line int)
RETURNS TABLE (line int, state musterd.state, attempt int, input json, result json, error text, outputs json, finished_at timestamptz,
               started_at timestamptz, run_seconds real, error_group text, error_code text)
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT * FROM musterd.batch_rows(p_batch, p_line, p_line)
$$;
COMMENT ON FUNCTION musterd.batch_row(bigint, int) IS 'One line of a batch, as batch_rows shows it; no row when there is no such line.';

-- -------------------------------------------------------------------------------------------------------------- progress

CREATE VIEW musterd.batch_progress AS
SELECT b.id,
       -- A canary may run behind a cursor that has not moved.
       musterd.shown_state(t.state, CASE WHEN b.canary IS NULL THEN b.next_line ELSE 2 END, b.generation, b.aborting) AS state,
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
       b.outputs,
       b.data_gone_at,
       b.record_until,
       b.outputs_gone,
       b.archive,
       b.data_held,
       b.keep
  FROM musterd.batches b
  JOIN musterd.task_records t ON t.id = b.id
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

-- What producers read. A barrier: no function of theirs sees a row before it is known to be their own.
CREATE VIEW musterd.my_tasks WITH (security_barrier) AS
SELECT t.* FROM musterd.tasks t WHERE t.submitted_by = (SELECT musterd.caller());
COMMENT ON VIEW musterd.my_tasks IS 'Those of musterd.tasks that the caller submitted, and their children. For producers.';

CREATE VIEW musterd.my_batches WITH (security_barrier) AS
SELECT p.* FROM musterd.batch_progress p JOIN musterd.task_records t ON t.id = p.id WHERE t.submitted_by = (SELECT musterd.caller());
COMMENT ON VIEW musterd.my_batches IS 'Those of musterd.batch_progress that the caller submitted. For producers; their rows: batch_rows.';

CREATE VIEW musterd.output_texts AS
SELECT o.batch_id, o.first_line, o.lines, o.outputs FROM musterd.outcomes o WHERE o.outputs IS NOT NULL
UNION ALL
SELECT f.batch_id, f.line, int4multirange(int4range(f.line, f.line + 1)), f.outputs::text FROM musterd.failures f WHERE f.outputs IS NOT NULL;
COMMENT ON VIEW musterd.output_texts IS
    'The text that rows of a batch add to output files, as outcomes has it, also of rows that failed. Ask for one batch.';

CREATE VIEW musterd.recorded_lines AS
    SELECT o.batch_id, (o.first_line - 1) / 10000 AS stripe, l.lines, true AS succeeded
      FROM musterd.outcomes o CROSS JOIN LATERAL unnest(o.lines) l (lines) WHERE o.first_line > 0
    UNION ALL
    SELECT f.batch_id, (f.line - 1) / 10000, int4range(f.line, f.line + 1), false
      FROM musterd.failures f;
COMMENT ON VIEW musterd.recorded_lines IS
    'Which lines of a batch have an outcome, as ranges; none of them crosses a multiple of 10,000 (its stripe). Ask for one batch.';

-- -------------------------------------------------------------------------------------------------------- errors in groups

CREATE FUNCTION musterd.count_errors(p_batch bigint, p_most int) RETURNS TABLE (error_group text, count bigint)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT musterd.error_group_name(f.error_group), count(*) FROM musterd.failures f WHERE f.batch_id = p_batch
     GROUP BY f.error_group ORDER BY 2 DESC, min(f.line) LIMIT p_most
$$;
COMMENT ON FUNCTION musterd.count_errors(bigint, int) IS 'Internal: the largest groups of errors of a batch.';

CREATE FUNCTION musterd.batch_errors(p_batch bigint, p_generation int DEFAULT NULL, p_most int DEFAULT 1000)
RETURNS TABLE (error_group text, count bigint, share float8, first_line int, last_line int, attempts int, error_code text, sample text)
LANGUAGE sql STABLE SECURITY DEFINER ROWS 20 SET search_path = pg_catalog, pg_temp SET jit = off AS $$
    WITH b AS MATERIALIZED (SELECT p_batch AS id WHERE musterd.may_see(p_batch)),
    g AS MATERIALIZED (
        -- Of the failures as they are: by the index alone.
        SELECT f.error_group, count(*) AS number, min(f.line) AS first, max(f.line) AS last, max(f.attempt) AS attempts
          FROM b JOIN musterd.failures f ON f.batch_id = b.id WHERE p_generation IS NULL GROUP BY f.error_group
        UNION ALL
        SELECT h.error_group, count(*), min(h.line), max(h.line), max(h.attempt)
          FROM (SELECT f.error_group, f.line, f.attempt FROM b JOIN musterd.failures f ON f.batch_id = b.id
                 WHERE f.generation = p_generation
                UNION ALL
                SELECT f.error_group, f.line, f.attempt FROM b JOIN musterd.failures_history f ON f.batch_id = b.id
                 WHERE f.generation = p_generation) h
         WHERE p_generation IS NOT NULL GROUP BY h.error_group),
    t AS MATERIALIZED (
        SELECT g.*, (g.number / sum(g.number) OVER ())::float8 AS share FROM g ORDER BY g.number DESC, g.first LIMIT p_most)
    SELECT musterd.error_group_name(g.error_group), g.number, g.share, g.first, g.last, g.attempts,
           COALESCE(f.error_code, h.error_code), COALESCE(f.error, h.error)
      FROM t g
      LEFT JOIN musterd.failures f ON f.batch_id = p_batch AND f.line = g.first AND (p_generation IS NULL OR f.generation = p_generation)
      LEFT JOIN musterd.failures_history h ON h.batch_id = p_batch AND h.line = g.first AND h.generation = p_generation
     ORDER BY g.number DESC, g.first
$$;
COMMENT ON FUNCTION musterd.batch_errors(bigint, int, int) IS
    'The failed rows of a batch by group of errors, the largest first: how many, their share of all that failed, the first and last of '
    'their lines, the most attempts one of them had, and the error of the first as a sample. With p_generation: of the rows that failed in '
    'that generation, also those that were run again since. At most p_most groups. Of a batch that the caller may not read there are none.';

CREATE FUNCTION musterd.errors(p_since timestamptz, p_command text DEFAULT NULL, p_most int DEFAULT 1000)
RETURNS TABLE (command text, error_group text, count bigint, share float8, batches bigint, first_batch bigint, last_batch bigint,
               error_code text, sample text)
LANGUAGE sql STABLE SECURITY DEFINER ROWS 20 SET search_path = pg_catalog, pg_temp SET jit = off AS $$
    WITH b AS MATERIALIZED (
        SELECT b.id, b.command, t.created_at >= p_since AS is_young
          FROM musterd.batches b JOIN musterd.task_records t ON t.id = b.id
         WHERE (b.summarized_at IS NULL OR b.summarized_at >= p_since) AND (p_command IS NULL OR b.command = p_command)
           AND musterd.may_see(b.id)),
    g AS MATERIALIZED (
        -- What a young batch has failed is young, so the index is enough.
        SELECT b.id, b.command, f.error_group, f.number, f.first FROM b
         CROSS JOIN LATERAL (SELECT f.error_group, count(*) AS number, min(f.line) AS first FROM musterd.failures f
                              WHERE f.batch_id = b.id AND b.is_young GROUP BY f.error_group) f
        UNION ALL
        SELECT b.id, b.command, f.error_group, f.number, f.first FROM b
         CROSS JOIN LATERAL (SELECT f.error_group, count(*) AS number, min(f.line) AS first FROM musterd.failures f
                              WHERE f.batch_id = b.id AND NOT b.is_young AND f.finished_at >= p_since GROUP BY f.error_group) f),
    s AS MATERIALIZED (
        SELECT g.command, g.error_group, sum(g.number)::bigint AS number, count(*) AS batches, min(g.id) AS first, max(g.id) AS last,
               (array_agg(g.first ORDER BY g.id DESC))[1] AS line, (sum(g.number) / sum(sum(g.number)) OVER ())::float8 AS share
          FROM g GROUP BY g.command, g.error_group ORDER BY sum(g.number) DESC, g.command, max(g.id) DESC LIMIT p_most)
    SELECT s.command, musterd.error_group_name(s.error_group), s.number, s.share, s.batches, s.first,
           s.last, f.error_code, f.error
      FROM s LEFT JOIN musterd.failures f ON f.batch_id = s.last AND f.line = s.line
     ORDER BY s.number DESC, s.command, s.last DESC
$$;
COMMENT ON FUNCTION musterd.errors(timestamptz, text, int) IS
    'Rows that have failed since then and were not run again, in all batches that the caller may read, by command and group of errors, the '
    'largest first; the sample is of the newest batch.';

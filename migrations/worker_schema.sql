-- The names of the STATBUS worker over the tables of Muster: `musterd migrate --with-worker-schema`.
--
-- Rule of this file: it stores nothing. Every name here is a view or a function of one or two lines over the schema musterd, in the words
-- and with the arguments that handlers and tests of that worker are written in. It is no migration: it is run again by every migrate
-- of a database that has it, so every statement replaces what it finds, and procedures of the user's own may live beside it. A migration
-- that takes a column from musterd.tasks drops worker.tasks first.

CREATE SCHEMA IF NOT EXISTS worker;

DO $$
BEGIN
    CREATE TYPE worker.task_state AS ENUM ('pending', 'processing', 'waiting', 'completed', 'failed');
EXCEPTION
    WHEN duplicate_object THEN
        NULL;
END $$;
COMMENT ON TYPE worker.task_state IS
    'musterd.state in five words: pending is held, scheduled or queued; failed is failed or aborted.';

CREATE OR REPLACE FUNCTION worker.state_of(p_state musterd.state) RETURNS worker.task_state
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE p_state WHEN 'running' THEN 'processing'
                        WHEN 'waiting' THEN 'waiting'
                        WHEN 'succeeded' THEN 'completed'
                        WHEN 'failed' THEN 'failed'
                        WHEN 'aborted' THEN 'failed'
                        ELSE 'pending' END::worker.task_state
$$;
COMMENT ON FUNCTION worker.state_of(musterd.state) IS 'A state of Muster in the words of this schema.';

CREATE OR REPLACE FUNCTION worker.current_task_id() RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT NULLIF(pg_catalog.current_setting('musterd.task_id', true), '')::bigint
$$;
COMMENT ON FUNCTION worker.current_task_id() IS 'The task whose procedure this is; null outside of one.';

-- Simple columns of one view, so that the server passes an INSERT on to the table as it is. The state is Muster's alone to write.
CREATE OR REPLACE VIEW worker.tasks AS
SELECT t.id, t.command, t.priority, t.created_at, worker.state_of(t.state) AS state,
       t.claimed_at AS processed_at, t.finished_at AS completed_at,
       EXTRACT(EPOCH FROM t.finished_at - t.claimed_at) * 1000 AS duration_ms,
       t.error, t.run_at AS scheduled_at,
       CASE WHEN t.id = worker.current_task_id() THEN pg_catalog.pg_backend_pid() END AS worker_pid,
       t.payload, t.parent_id, t.queue, t.result
  FROM musterd.tasks t;
COMMENT ON VIEW worker.tasks IS
    'musterd.tasks with the names and the states of the STATBUS worker. INSERT INTO worker.tasks (command, payload) enqueues a task.';
COMMENT ON COLUMN worker.tasks.state IS 'pending, processing, waiting, completed or failed; written by Muster alone.';
COMMENT ON COLUMN worker.tasks.processed_at IS 'When it was claimed last.';
COMMENT ON COLUMN worker.tasks.duration_ms IS 'From its last claim to its end; of a parent with the time of its children.';
COMMENT ON COLUMN worker.tasks.scheduled_at IS 'Due from then on; infinity while it waits for other tasks.';
COMMENT ON COLUMN worker.tasks.worker_pid IS 'Set for the task whose procedure asks, and for no other.';

CREATE OR REPLACE PROCEDURE worker.spawn(p_command text, p_payload jsonb DEFAULT '{}', p_parent_id bigint DEFAULT NULL,
                                         p_priority bigint DEFAULT NULL)
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM musterd.spawn(p_command, p_payload, p_parent_id, p_priority::int);
END $$;
COMMENT ON PROCEDURE worker.spawn(text, jsonb, bigint, bigint) IS
    'Adds a child to a task; without a parent, a top-level task. musterd.spawn is the same as a function, and returns the id.';

CREATE OR REPLACE PROCEDURE worker.process_tasks(p_batch_size int DEFAULT NULL, p_queue text DEFAULT NULL)
LANGUAGE plpgsql AS $$
BEGIN
    CALL musterd.process_tasks(p_queue, p_batch_size);
END $$;
COMMENT ON PROCEDURE worker.process_tasks(int, text) IS
    'One round of a queue, or of each, in the caller''s transaction: musterd.process_tasks.';

CREATE OR REPLACE FUNCTION worker.has_pending_children(p_task_id bigint DEFAULT worker.current_task_id()) RETURNS boolean
LANGUAGE sql AS $$
    SELECT musterd.has_pending_children(p_task_id)
$$;
COMMENT ON FUNCTION worker.has_pending_children(bigint) IS
    'Whether a task has children that have not ended; without an argument, the task whose procedure asks.';

CREATE OR REPLACE FUNCTION worker.has_failed_siblings(p_task_id bigint DEFAULT worker.current_task_id()) RETURNS boolean
LANGUAGE sql AS $$
    SELECT musterd.has_failed_siblings(p_task_id)
$$;
COMMENT ON FUNCTION worker.has_failed_siblings(bigint) IS
    'Whether a sibling of a task has failed; without an argument, of the task whose procedure asks.';

CREATE OR REPLACE FUNCTION worker.complete_parent_if_ready(p_child_task_id bigint DEFAULT worker.current_task_id()) RETURNS boolean
LANGUAGE sql AS $$
    SELECT COALESCE((SELECT musterd.complete_parent_if_ready(t.parent_id) FROM musterd.tasks t
                      WHERE t.id = p_child_task_id AND t.parent_id IS NOT NULL), false)
$$;
COMMENT ON FUNCTION worker.complete_parent_if_ready(bigint) IS
    'Ends the parent of a task if it waits and all of its children have ended; whether this call did. Workers and process_tasks do it '
    'by themselves.';

CREATE OR REPLACE FUNCTION worker.enforce_no_grandchildren() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM musterd.tasks t WHERE t.id = NEW.parent_id AND t.parent_id IS NOT NULL) THEN
        RAISE EXCEPTION 'task % is a child itself and cannot have children', NEW.parent_id
            USING ERRCODE = 'check_violation', HINT = 'To spawn a sibling, pass the parent of that task.';
    END IF;
    RETURN NEW;
END $$;
COMMENT ON FUNCTION worker.enforce_no_grandchildren() IS
    'A trigger for tables of your own that have a parent_id. For tasks the rule is kept by the trigger of musterd.task_records.';

DO $$
DECLARE
    v_right record;
BEGIN
    -- By name: procedures of the user's in this schema keep the rights that they have.
    REVOKE ALL ON worker.tasks FROM PUBLIC;
    REVOKE ALL ON PROCEDURE worker.spawn(text, jsonb, bigint, bigint), worker.process_tasks(int, text) FROM PUBLIC;
    REVOKE ALL ON FUNCTION worker.state_of(musterd.state), worker.current_task_id(), worker.has_pending_children(bigint),
        worker.has_failed_siblings(bigint), worker.complete_parent_if_ready(bigint), worker.enforce_no_grandchildren() FROM PUBLIC;
    -- Each role has here what it has in the schema musterd.
    FOR v_right IN
        SELECT pg_catalog.format(g.statement, r.rolname) AS statement
          FROM pg_catalog.pg_roles r
          JOIN (VALUES ('musterd_observer', 'GRANT SELECT ON worker.tasks TO %I'),
                       ('musterd_operator', 'GRANT SELECT ON worker.tasks TO %I'),
                       ('musterd_producer', 'GRANT INSERT (command, payload, queue, priority, scheduled_at) ON worker.tasks TO %I'),
                       ('musterd_producer', 'GRANT EXECUTE ON PROCEDURE worker.spawn(text, jsonb, bigint, bigint) TO %I'),
                       ('musterd_worker', 'GRANT SELECT, INSERT ON worker.tasks TO %I'),
                       ('musterd_worker', 'GRANT EXECUTE ON PROCEDURE worker.spawn(text, jsonb, bigint, bigint), worker.process_tasks(int, text) TO %I'),
                       ('musterd_worker', 'GRANT EXECUTE ON FUNCTION worker.complete_parent_if_ready(bigint), worker.enforce_no_grandchildren() TO %I'))
               g (role, statement) ON g.role = r.rolname
         UNION ALL
        SELECT pg_catalog.format('GRANT USAGE ON SCHEMA worker TO %1$I; GRANT EXECUTE ON FUNCTION worker.state_of(musterd.state), '
                                 'worker.current_task_id(), worker.has_pending_children(bigint), worker.has_failed_siblings(bigint) TO %1$I', r.rolname)
          FROM pg_catalog.pg_roles r WHERE r.rolname IN ('musterd_observer', 'musterd_operator', 'musterd_producer', 'musterd_worker')
         UNION ALL
        SELECT 'GRANT SELECT ON worker.tasks TO musterd_producer'
          FROM pg_catalog.pg_roles r
         WHERE r.rolname = 'musterd_producer' AND pg_catalog.has_table_privilege('musterd_producer', 'musterd.tasks', 'SELECT')
    LOOP
        EXECUTE v_right.statement;
    END LOOP;
END $$;

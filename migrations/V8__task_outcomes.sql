-- What workers call for tasks: the outcomes of a flush, a second chance by hand, and where a structured queue looks.
--
-- Rule of this file: locks in the order of ids before anything is decided, everything guarded by the token, and no scope is
-- completed here: the worker asks for that after its commit.

CREATE TYPE musterd.task_outcome AS (
    id      bigint,
    token   uuid,
    outcome text,        -- succeeded, failed, retry, give_back
    result  jsonb,
    error   text,
    wait    float8,      -- seconds until a retry is due
    spawn   jsonb,       -- children (or, of a child, siblings): [{"command", "payload", "priority", "child_key", "queue", …}]
    after   jsonb        -- uncles of this task: [{"command", "payload", "queue", "dedup_key", …}]
);
COMMENT ON TYPE musterd.task_outcome IS 'What became of one attempt of a task, as finish_tasks takes it.';

CREATE FUNCTION musterd.lock_for_outcomes(p_outcomes musterd.task_outcome[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_lock record;
BEGIN
    -- A child that spawns a sibling shares its parent's lock; parents have smaller ids than their children, and two workers
    -- must not take them in different orders.
    FOR v_lock IN
        SELECT l.id, bool_or(l.own) AS own
          FROM (SELECT o.id, true AS own FROM unnest(p_outcomes) o
                UNION ALL
                SELECT t.parent_id, false
                  FROM unnest(p_outcomes) o JOIN musterd.tasks t ON t.id = o.id
                 WHERE t.parent_id IS NOT NULL AND jsonb_array_length(COALESCE(o.spawn, '[]')) > 0) l
         GROUP BY l.id ORDER BY l.id
    LOOP
        IF v_lock.own THEN
            PERFORM 1 FROM musterd.tasks t WHERE t.id = v_lock.id FOR NO KEY UPDATE;
        ELSE
            PERFORM 1 FROM musterd.tasks t WHERE t.id = v_lock.id FOR SHARE;
        END IF;
    END LOOP;
END $$;
COMMENT ON FUNCTION musterd.lock_for_outcomes(musterd.task_outcome[]) IS
    'Internal: locks the tasks of these outcomes, and the parents their siblings will join, in the order of ids.';

CREATE FUNCTION musterd.finish_tasks(p_outcomes musterd.task_outcome[])
RETURNS TABLE (task_id bigint, task_state musterd.state, scope_id bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_ended bigint[];
    v_uncle record;
BEGIN
    PERFORM musterd.lock_for_outcomes(p_outcomes);

    -- Children first: whether a task has any decides what becomes of it.
    INSERT INTO musterd.tasks (command, payload, parent_id, queue, priority, child_key, max_attempts, run_at, traceparent)
    SELECT s.child ->> 'command', COALESCE(s.child -> 'payload', '{}'), COALESCE(t.parent_id, t.id), s.child ->> 'queue',
           (s.child ->> 'priority')::int, s.child ->> 'child_key', (s.child ->> 'max_attempts')::int,
           now() + COALESCE((s.child ->> 'delay_seconds')::float8, 0) * interval '1 second', t.traceparent
      FROM unnest(p_outcomes) o
      JOIN musterd.tasks t ON t.id = o.id AND t.token = o.token AND t.state = 'running'
     CROSS JOIN LATERAL jsonb_array_elements(COALESCE(o.spawn, '[]')) WITH ORDINALITY s (child, place)
     WHERE o.outcome = 'succeeded'
     ORDER BY t.id, s.place
        ON CONFLICT (parent_id, child_key) WHERE parent_id IS NOT NULL DO NOTHING;
    FOR v_uncle IN
        SELECT t.id, a.uncle
          FROM unnest(p_outcomes) o
          JOIN musterd.tasks t ON t.id = o.id AND t.token = o.token AND t.state = 'running'
         CROSS JOIN LATERAL jsonb_array_elements(COALESCE(o.after, '[]')) WITH ORDINALITY a (uncle, place)
         WHERE o.outcome = 'succeeded'
         ORDER BY t.id, a.place
    LOOP
        -- An uncle of a child waits for the scope, not for the one child that asked for it.
        PERFORM musterd.enqueue_after(
            v_uncle.uncle ->> 'command', COALESCE(v_uncle.uncle -> 'payload', '{}'),
            ARRAY (SELECT COALESCE(t.parent_id, t.id) FROM musterd.tasks t WHERE t.id = v_uncle.id),
            queue => v_uncle.uncle ->> 'queue', priority => (v_uncle.uncle ->> 'priority')::int,
            dedup_key => v_uncle.uncle ->> 'dedup_key',
            dedup_replace => COALESCE((v_uncle.uncle ->> 'dedup_replace')::boolean, false));
    END LOOP;

    RETURN QUERY
    UPDATE musterd.tasks t
       SET state = CASE WHEN o.outcome = 'retry' THEN 'scheduled'
                        WHEN o.outcome = 'give_back' THEN 'queued'
                        WHEN EXISTS (SELECT FROM musterd.tasks c WHERE c.parent_id = t.id) THEN 'waiting'
                        WHEN o.outcome = 'succeeded' THEN 'succeeded'
                        ELSE 'failed' END::musterd.state,
           attempt = CASE WHEN o.outcome = 'retry' THEN t.attempt + 1 ELSE t.attempt END,
           run_at = CASE WHEN o.outcome = 'retry' THEN clock_timestamp() + o.wait * interval '1 second' ELSE t.run_at END,
           result = COALESCE(o.result, t.result),
           error = CASE o.outcome WHEN 'succeeded' THEN NULL WHEN 'give_back' THEN t.error ELSE o.error END,
           finished_at = CASE WHEN o.outcome IN ('succeeded', 'failed')
                               AND NOT EXISTS (SELECT FROM musterd.tasks c WHERE c.parent_id = t.id)
                              THEN clock_timestamp() END,
           worker = NULL, token = NULL
      FROM unnest(p_outcomes) o
     WHERE t.id = o.id AND t.token = o.token AND t.state = 'running'
    RETURNING t.id, t.state, COALESCE(t.parent_id, CASE WHEN t.state = 'waiting' THEN t.id END);

    v_ended := ARRAY (
        SELECT t.id FROM unnest(p_outcomes) o JOIN musterd.tasks t ON t.id = o.id
         WHERE t.state IN ('succeeded', 'failed') AND o.outcome IN ('succeeded', 'failed') ORDER BY t.id);
    PERFORM musterd.release_uncles(v_ended);
    PERFORM musterd.tell_ended(v_ended);
    PERFORM pg_notify('musterd_wake', q.queue)
       FROM (SELECT DISTINCT t.queue FROM unnest(p_outcomes) o JOIN musterd.tasks t ON t.id = o.id
              WHERE o.outcome = 'give_back' AND t.state = 'queued') q;
END $$;
COMMENT ON FUNCTION musterd.finish_tasks(musterd.task_outcome[]) IS
    'Writes the outcomes of tasks that are still held with their tokens: children, uncles and state in one. Returns a row for '
    'each that was held, with its new state and the scope to check after the commit; the others were refused.';

CREATE FUNCTION musterd.retry_task(id bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_task musterd.tasks := musterd.lock_task(retry_task.id);
BEGIN
    IF v_task.state = 'scheduled' AND v_task.not_before IS NULL THEN
        UPDATE musterd.tasks t SET state = 'queued', run_at = now() WHERE t.id = retry_task.id;
    ELSIF v_task.state NOT IN ('failed', 'aborted') THEN
        RETURN v_task.state;
    ELSIF EXISTS (SELECT FROM musterd.batches b WHERE b.id = retry_task.id) THEN
        RAISE EXCEPTION 'task % is a batch; export its failed rows and submit them again', retry_task.id
            USING ERRCODE = 'check_violation';
    ELSIF EXISTS (SELECT FROM musterd.tasks p WHERE p.id = v_task.parent_id AND p.state IN ('succeeded', 'failed', 'aborted')) THEN
        RAISE EXCEPTION 'task % belongs to task %, which has ended', retry_task.id, v_task.parent_id
            USING ERRCODE = 'check_violation', HINT = 'Enqueue it anew.';
    ELSIF EXISTS (SELECT FROM musterd.tasks c WHERE c.parent_id = retry_task.id) THEN
        RAISE EXCEPTION 'task % has children, which have ended with it', retry_task.id
            USING ERRCODE = 'check_violation', HINT = 'Enqueue it anew.';
    ELSE
        UPDATE musterd.tasks t
           SET state = 'queued', run_at = now(), attempt = 1, crashes = 0, finished_at = NULL, aborting = false
         WHERE t.id = retry_task.id;
    END IF;
    PERFORM pg_notify('musterd_wake', v_task.queue);
    RETURN 'queued';
END $$;
COMMENT ON FUNCTION musterd.retry_task(bigint) IS
    'By hand: runs a failed or aborted task again, from its first attempt, or a scheduled one at once. Returns the state '
    'afterwards; what runs, waits or succeeded is left as it is.';

CREATE FUNCTION musterd.focus(p_queue text, p_commands text[]) RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.id
      FROM (SELECT p.id, p.priority FROM musterd.tasks p
             WHERE p.state = 'waiting' AND p.queue = p_queue
               AND EXISTS (SELECT FROM musterd.tasks c
                            WHERE c.parent_id = p.id AND c.queue = p_queue
                              AND (c.state = 'running' AND (c.worker IS NOT NULL OR EXISTS (
                                       SELECT FROM musterd.batches b
                                        WHERE b.id = c.id AND (b.aborting OR EXISTS (
                                              SELECT FROM musterd.blocks k WHERE k.batch_id = b.id AND k.available_at <= now())
                                              OR (b.open AND b.next_line <= b.rows AND b.command = ANY (p_commands)))))
                                   OR c.state = 'queued' AND c.command = ANY (p_commands)
                                   OR c.state = 'scheduled' AND c.run_at <= now() AND c.command = ANY (p_commands)))
            UNION ALL
            SELECT b.id, b.priority FROM musterd.batches b JOIN musterd.tasks t ON t.id = b.id AND t.parent_id IS NULL
             WHERE b.queue = p_queue AND b.summarized_at IS NULL AND b.open AND b.command = ANY (p_commands)
               AND (b.next_line <= b.rows
                    OR EXISTS (SELECT FROM musterd.blocks k WHERE k.batch_id = b.id AND k.available_at <= now()))) s
     ORDER BY s.priority, s.id LIMIT 1;
$$;
COMMENT ON FUNCTION musterd.focus(text, text[]) IS
    'For queues in structured mode: the first scope, by priority and id, with a child or row that runs or could run now by '
    'one of these commands. All fibers work on it alone. Null: top-level tasks are next.';

DO $$
BEGIN
    -- Grants of V7 were given before these functions existed.
    PERFORM musterd.grant_roles();
END $$;

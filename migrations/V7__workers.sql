-- What workers call: the outcomes of tasks, and where a structured queue looks. (The statements on blocks and outcomes of rows
-- are the worker's own, in src/store/sql.)
--
-- Rule of this file: locks in the order of ids before anything is decided, everything guarded by the token, and no scope is
-- completed here: the worker asks for that after its commit.

CREATE TYPE musterd.task_outcome AS (
    id      bigint,
    token   uuid,
    outcome text,        -- succeeded, failed, retry, give_back, crashed (as retry, but counted as a crash, not as an attempt)
    result  jsonb,
    error   text,
    wait    float8,      -- seconds until it is due again
    spawn   jsonb,       -- children (or, of a child, siblings): [{"command", "payload", "priority", "child_key", "queue"}]
    after   jsonb        -- uncles of this task: [{"command", "payload", "queue", "dedup_key", …}]
);
COMMENT ON TYPE musterd.task_outcome IS 'What became of one attempt of a task, as finish_tasks takes it.';

CREATE FUNCTION musterd.lock_for_outcomes(p_outcomes musterd.task_outcome[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_lock record;
BEGIN
    -- A child that spawns a sibling, or an uncle of its scope, shares its parent's lock; parents have smaller ids than
    -- their children, and two workers must not take them in different orders.
    FOR v_lock IN
        SELECT l.id, bool_or(l.own) AS own
          FROM (SELECT o.id, true AS own FROM unnest(p_outcomes) o
                UNION ALL
                SELECT t.parent_id, false
                  FROM unnest(p_outcomes) o JOIN musterd.tasks t ON t.id = o.id
                 WHERE t.parent_id IS NOT NULL AND COALESCE(o.spawn, o.after) IS NOT NULL) l
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
    v_ended   bigint[] := '{}';
    v_waiting bigint[] := '{}';
    v_queues  text[] := '{}';
    v_queue   text;
    v_uncle   record;
BEGIN
    PERFORM musterd.lock_for_outcomes(p_outcomes);

    -- Children first: whether a task has any decides what becomes of it.
    INSERT INTO musterd.tasks (command, payload, parent_id, queue, priority, child_key, traceparent)
    SELECT s.child ->> 'command', COALESCE(s.child -> 'payload', '{}'), COALESCE(t.parent_id, t.id), s.child ->> 'queue',
           (s.child ->> 'priority')::int, s.child ->> 'child_key', t.traceparent
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
        PERFORM musterd.check_name(format('command of an uncle of task %s', v_uncle.id), v_uncle.uncle ->> 'command');
        -- An uncle of a child waits for the scope, not for the one child that asked for it.
        PERFORM musterd.enqueue_after(
            v_uncle.uncle ->> 'command', COALESCE(v_uncle.uncle -> 'payload', '{}'),
            ARRAY (SELECT COALESCE(t.parent_id, t.id) FROM musterd.tasks t WHERE t.id = v_uncle.id),
            queue => v_uncle.uncle ->> 'queue', priority => (v_uncle.uncle ->> 'priority')::int,
            dedup_key => v_uncle.uncle ->> 'dedup_key',
            dedup_replace => COALESCE((v_uncle.uncle ->> 'dedup_replace')::boolean, false));
    END LOOP;

    FOR task_id, task_state, scope_id, v_queue IN
        UPDATE musterd.tasks t
           SET state = CASE WHEN o.outcome IN ('retry', 'crashed') OR (o.outcome = 'give_back' AND o.wait > 0) THEN 'scheduled'
                            WHEN o.outcome = 'give_back' THEN 'queued'
                            WHEN EXISTS (SELECT FROM musterd.tasks c WHERE c.parent_id = t.id) THEN 'waiting'
                            WHEN o.outcome = 'succeeded' THEN 'succeeded'
                            ELSE 'failed' END::musterd.state,
               attempt = CASE WHEN o.outcome = 'retry' THEN t.attempt + 1 ELSE t.attempt END,
               crashes = CASE WHEN o.outcome = 'crashed' THEN t.crashes + 1 ELSE t.crashes END,
               -- Its connection is its own: no other task can have broken it.
               solo_crashes = CASE WHEN o.outcome = 'crashed' THEN t.solo_crashes + 1 ELSE t.solo_crashes END,
               run_at = CASE WHEN o.outcome IN ('retry', 'crashed', 'give_back')
                             THEN clock_timestamp() + COALESCE(o.wait, 0) * interval '1 second' ELSE t.run_at END,
               result = COALESCE(o.result, t.result),
               error = CASE o.outcome WHEN 'succeeded' THEN NULL ELSE COALESCE(o.error, t.error) END,
               finished_at = CASE WHEN o.outcome IN ('succeeded', 'failed')
                                   AND NOT EXISTS (SELECT FROM musterd.tasks c WHERE c.parent_id = t.id)
                                  THEN clock_timestamp() END,
               worker = NULL, token = NULL
          FROM unnest(p_outcomes) o
         WHERE t.id = o.id AND t.token = o.token AND t.state = 'running'
        RETURNING t.id, t.state, COALESCE(t.parent_id, CASE WHEN t.state = 'waiting' THEN t.id END), t.queue
    LOOP
        IF task_state IN ('succeeded', 'failed') THEN
            v_ended := v_ended || task_id;
        ELSIF task_state = 'waiting' THEN
            v_waiting := v_waiting || task_id;
        ELSIF task_state = 'queued' THEN
            v_queues := v_queues || v_queue;
        END IF;
        RETURN NEXT;
    END LOOP;
    PERFORM musterd.release_uncles(v_ended);
    PERFORM musterd.tell_ended(v_ended);
    PERFORM pg_notify('musterd_wake', q.queue) FROM (SELECT DISTINCT unnest(v_queues)) q (queue);
    -- Children that were there before are claimable in a structured queue only now.
    PERFORM musterd.wake_structured(q.queue)
       FROM (SELECT DISTINCT c.queue FROM musterd.tasks c WHERE c.parent_id = ANY (v_waiting)) q;
END $$;
COMMENT ON FUNCTION musterd.finish_tasks(musterd.task_outcome[]) IS
    'Writes the outcomes of tasks that are still held with their tokens: children, uncles and state in one. Returns a row for '
    'each that was held, with its new state and the scope to check after the commit; the others were refused.';

-- ------------------------------------------------------------------------------------------------------- structured queues

CREATE FUNCTION musterd.batch_has_work_now(p_batch musterd.batches, p_row_commands text[]) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT p_batch.aborting
        OR (p_batch.open AND p_batch.next_line <= p_batch.rows AND p_batch.command = ANY (p_row_commands))
        OR EXISTS (SELECT FROM musterd.blocks k
                    WHERE k.batch_id = p_batch.id
                      AND (k.worker IS NOT NULL
                           OR (p_batch.open AND k.available_at <= now() AND k.command = ANY (p_row_commands))));
$$;
COMMENT ON FUNCTION musterd.batch_has_work_now(musterd.batches, text[]) IS
    'Internal: whether rows of the batch run, or could run now by one of these commands.';

CREATE FUNCTION musterd.has_work_now(p_parent_id bigint, p_queue text, p_commands text[], p_row_commands text[]) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (
        SELECT FROM musterd.tasks c
          LEFT JOIN musterd.batches b ON b.id = c.id
         WHERE c.parent_id = p_parent_id AND c.queue = p_queue
           AND CASE WHEN b.id IS NOT NULL THEN c.state = 'running' AND musterd.batch_has_work_now(b, p_row_commands)
                    ELSE c.state = 'running'
                         OR ((c.state = 'queued' OR c.state = 'scheduled' AND c.run_at <= now()) AND c.command = ANY (p_commands))
               END);
$$;
COMMENT ON FUNCTION musterd.has_work_now(bigint, text, text[], text[]) IS
    'Internal: whether a child of the task, in this queue, runs or could run now by one of these commands.';

CREATE FUNCTION musterd.focus(p_queue text, p_commands text[], p_row_commands text[], p_any_priority boolean DEFAULT false,
                              p_tasks boolean DEFAULT true) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_scope record;
    v_batch record;
    v_task  record;
BEGIN
    -- A scope that has begun is brought to its end first. Nothing else begins meanwhile, so none of them can starve.
    SELECT s.id INTO v_scope
      FROM ((SELECT p.id, p.priority FROM musterd.tasks p
              WHERE p.state = 'waiting' AND musterd.has_work_now(p.id, p_queue, p_commands, p_row_commands)
              ORDER BY p.priority, p.id LIMIT 1)
            UNION ALL
            (SELECT b.id, b.priority FROM musterd.batches b JOIN musterd.tasks t ON t.id = b.id AND t.parent_id IS NULL
              WHERE b.queue = p_queue AND b.summarized_at IS NULL AND b.open
                AND (b.next_line > 1 OR b.generation > 1) AND musterd.batch_has_work_now(b, p_row_commands)
              ORDER BY b.priority, b.id LIMIT 1)) s
     ORDER BY s.priority, s.id LIMIT 1;
    IF FOUND THEN
        RETURN v_scope.id;
    END IF;

    -- None has: the next top-level task, or the next batch, whichever comes first.
    SELECT b.id, CASE WHEN p_any_priority THEN 0 ELSE b.priority END AS priority INTO v_batch
      FROM musterd.batches b JOIN musterd.tasks t ON t.id = b.id AND t.parent_id IS NULL
     WHERE b.queue = p_queue AND b.open AND b.next_line <= b.rows AND b.command = ANY (p_row_commands)
     ORDER BY 2, b.id LIMIT 1;
    IF NOT FOUND OR NOT p_tasks THEN
        RETURN v_batch.id;
    END IF;
    IF p_any_priority THEN
        SELECT t.id, 0 AS priority INTO v_task FROM musterd.tasks t
         WHERE t.queue = p_queue AND t.state = 'queued' AND t.parent_id IS NULL AND t.command = ANY (p_commands)
         ORDER BY t.id LIMIT 1;
    ELSE
        SELECT t.id, t.priority INTO v_task FROM musterd.tasks t
         WHERE t.queue = p_queue AND t.state = 'queued' AND t.parent_id IS NULL AND t.command = ANY (p_commands)
         ORDER BY t.priority, t.id LIMIT 1;
    END IF;
    RETURN CASE WHEN NOT FOUND OR (v_batch.priority, v_batch.id) < (v_task.priority, v_task.id) THEN v_batch.id END;
END $$;
COMMENT ON FUNCTION musterd.focus(text, text[], text[], boolean, boolean) IS
    'For queues in structured mode: the scope all fibers work on. The first, by priority and id, that has begun and has a '
    'child or row that runs, or could run now by one of these commands; else the first batch, unless a top-level task comes '
    'before it. Null: top-level tasks are next.';

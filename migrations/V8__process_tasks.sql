-- Tasks without a daemon: process_tasks runs sql tasks in the caller's own transaction.
--
-- Rule of this file: one call is one round of the structured mode. It starts either with the children of the first waiting
-- parent or with top-level tasks, and returns when that mode is over; so a test can look at what is in between. Nothing
-- commits here: BEGIN; CALL …; ROLLBACK leaves no trace.
--
-- No SET search_path on what calls the user's procedure: the procedure sees the caller's, as it does in a worker. Hence
-- every name is qualified.

CREATE FUNCTION musterd.end_task(p_id bigint, p_token uuid, p_error text) RETURNS musterd.state
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_children boolean := EXISTS (SELECT FROM musterd.tasks t WHERE t.parent_id = p_id);
    v_state    musterd.state;
    v_parent   bigint;
BEGIN
    UPDATE musterd.tasks t
       SET state = CASE WHEN v_children THEN 'waiting' WHEN p_error IS NULL THEN 'succeeded' ELSE 'failed' END::musterd.state,
           finished_at = CASE WHEN NOT v_children THEN clock_timestamp() END,
           error = p_error, worker = NULL, token = NULL
     WHERE t.id = p_id AND t.token = p_token AND t.state = 'running'
    RETURNING t.state, t.parent_id INTO v_state, v_parent;
    IF v_state IS NULL THEN
        RETURN NULL;
    ELSIF v_children THEN
        PERFORM musterd.complete_parent_if_ready(p_id);
    ELSE
        PERFORM musterd.release_uncles(ARRAY[p_id]);
        PERFORM musterd.tell_ended(ARRAY[p_id]);
        -- Do not lock a parent that has other children open: callers would take turns. Should two of them end the last
        -- two children side by side, each sees the other's as open; a worker, or the next round, then ends the parent.
        IF musterd.has_pending_children(v_parent) THEN
            PERFORM pg_notify('musterd_check', v_parent::text);
        ELSE
            PERFORM musterd.complete_parent_if_ready(v_parent);
        END IF;
    END IF;
    RETURN v_state;
END $$;
COMMENT ON FUNCTION musterd.end_task(bigint, uuid, text) IS
    'Ends a task held with this token (with children: makes it wait for them), starts its uncles, checks its parent. Returns '
    'the new state; null, and nothing happened, when the token is no longer the task''s.';

CREATE FUNCTION musterd.fail_attempt(p_id bigint, p_token uuid, p_error text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- 1 s, 2 s, 4 s … at most 5 min, with jitter, as the worker's defaults have it.
    UPDATE musterd.tasks t
       SET state = 'scheduled', attempt = t.attempt + 1, error = p_error, worker = NULL, token = NULL,
           run_at = clock_timestamp()
                    + LEAST(300, 2 ^ LEAST(t.attempt - 1, 10)) * (0.5 + random() / 2) * interval '1 second'
     WHERE t.id = p_id AND t.token = p_token AND t.state = 'running' AND t.attempt < COALESCE(t.max_attempts, 3);
    IF NOT FOUND THEN
        PERFORM musterd.end_task(p_id, p_token, p_error);
    END IF;
END $$;
COMMENT ON FUNCTION musterd.fail_attempt(bigint, uuid, text) IS
    'Internal: schedules the next attempt of a task held with this token, or ends it as failed when none is left.';

CREATE FUNCTION musterd.describe_error(p_code text, p_message text, p_detail text, p_hint text, p_context text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT concat_ws(E'\n',
        format('%s (SQLSTATE %s)', p_message, p_code),
        'detail: ' || NULLIF(p_detail, ''),
        'hint: ' || NULLIF(p_hint, ''),
        -- What stands behind the procedure is how it was called, which a worker does otherwise.
        'context: ' || NULLIF(regexp_replace(p_context,
            '(^|\n)(SQL statement "CALL [^\n]*"\n)?PL/pgSQL function musterd\.run_task\(.*$', ''), ''),
        CASE WHEN p_code = '2D000'
             THEN 'hint: a procedure must not COMMIT or ROLLBACK: its effects and its outcome commit together' END);
$$;
COMMENT ON FUNCTION musterd.describe_error(text, text, text, text, text) IS
    'Internal: an exception of a procedure in the form that a worker stores.';

CREATE FUNCTION musterd.run_task(p_task musterd.tasks, p_procedure text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_proc    pg_catalog.regproc;
    v_code    text;
    v_message text;
    v_detail  text;
    v_hint    text;
    v_context text;
    v_fenced  boolean := false;
BEGIN
    BEGIN  -- a subtransaction: the effects of a failed attempt vanish with it
        SELECT p.oid INTO v_proc FROM pg_catalog.pg_proc p
         WHERE p.oid = pg_catalog.to_regprocedure(p_procedure OPERATOR(pg_catalog.||) '(bigint, jsonb)')
           AND p.prokind OPERATOR(pg_catalog.=) 'p';
        IF v_proc IS NULL THEN
            RAISE EXCEPTION 'command % has no procedure %(bigint, jsonb)', p_task.command, p_procedure
                USING ERRCODE = 'undefined_function';
        END IF;
        EXECUTE pg_catalog.format('CALL %s($1, $2)', v_proc) USING p_task.id, p_task.payload;
        IF musterd.end_task(p_task.id, p_task.token, NULL) IS NULL THEN
            v_fenced := true;
            RAISE EXCEPTION 'task % was taken away while it ran', p_task.id;
        END IF;
    EXCEPTION
        WHEN assert_failure OR OTHERS THEN
            GET STACKED DIAGNOSTICS v_code = RETURNED_SQLSTATE, v_message = MESSAGE_TEXT, v_detail = PG_EXCEPTION_DETAIL,
                                    v_hint = PG_EXCEPTION_HINT, v_context = PG_EXCEPTION_CONTEXT;
            -- The server's trouble is not the task's failure.
            IF pg_catalog.left(v_code, 2) IN ('08', '53') OR pg_catalog.left(v_code, 3) = '57P' THEN
                RAISE;
            END IF;
            IF NOT v_fenced THEN
                PERFORM musterd.fail_attempt(p_task.id, p_task.token,
                                             musterd.describe_error(v_code, v_message, v_detail, v_hint, v_context));
            END IF;
    END;
END $$;
COMMENT ON FUNCTION musterd.run_task(musterd.tasks, text) IS
    'Internal: one attempt of a claimed task. An exception is a failed attempt.';

CREATE FUNCTION musterd.claim_sql_task(p_queue text, p_parent_id bigint) RETURNS musterd.tasks
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_id   bigint;
    v_task musterd.tasks;
BEGIN
    SELECT t.id INTO v_id
      FROM musterd.tasks t JOIN musterd.commands c ON c.name = t.command
     WHERE t.queue = p_queue AND t.state = 'queued' AND t.parent_id IS NOT DISTINCT FROM p_parent_id
       AND c.kind = 'sql' AND c.procedure IS NOT NULL
     ORDER BY t.priority, t.id LIMIT 1 FOR NO KEY UPDATE OF t SKIP LOCKED;
    UPDATE musterd.tasks t
       SET state = 'running', worker = 'process_tasks-' || pg_backend_pid(), token = gen_random_uuid(),
           claimed_at = clock_timestamp()
     WHERE t.id = v_id RETURNING t.* INTO v_task;
    RETURN v_task;
END $$;
COMMENT ON FUNCTION musterd.claim_sql_task(text, bigint) IS
    'Internal: the next due sql task of a queue among the children of a parent, or among top-level tasks. Null: none.';

CREATE FUNCTION musterd.first_waiting_parent(p_queue text) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_id bigint;
BEGIN
    SELECT p.id INTO v_id FROM musterd.tasks p
     WHERE p.state = 'waiting' AND p.queue = p_queue
       AND EXISTS (SELECT FROM musterd.tasks t JOIN musterd.commands c ON c.name = t.command
                    WHERE t.parent_id = p.id AND t.queue = p_queue AND t.state = 'queued'
                      AND c.kind = 'sql' AND c.procedure IS NOT NULL)
     ORDER BY p.priority, p.id LIMIT 1;
    RETURN v_id;
END $$;
COMMENT ON FUNCTION musterd.first_waiting_parent(text) IS
    'Internal: the first scope of a queue, by priority and id, that has a child process_tasks can run now. One whose children '
    'are all for later does not block the queue.';

CREATE PROCEDURE musterd.process_queue(p_queue text, INOUT p_left int)
LANGUAGE plpgsql AS $$
DECLARE
    v_now    pg_catalog.timestamptz := pg_catalog.clock_timestamp();
    v_parent bigint;
    v_task   musterd.tasks;
BEGIN
    IF EXISTS (SELECT FROM musterd.paused_queues q WHERE q.name = p_queue) THEN
        RETURN;
    END IF;
    UPDATE musterd.tasks t SET state = 'queued'
     WHERE t.id = ANY (ARRAY (
               SELECT d.id FROM musterd.tasks d WHERE d.queue = p_queue AND d.state = 'scheduled' AND d.run_at <= v_now
                ORDER BY d.id FOR NO KEY UPDATE SKIP LOCKED));
    -- What two sessions left to each other, see end_task. A round of its own: the uncles of two scopes, locked one after
    -- the other in one transaction, would deadlock with a session that has them the other way round.
    SELECT p.id INTO v_parent FROM musterd.tasks p
     WHERE p.state = 'waiting' AND p.queue = p_queue AND NOT musterd.has_pending_children(p.id) ORDER BY p.id LIMIT 1;
    IF musterd.complete_parent_if_ready(v_parent) THEN
        RETURN;
    END IF;

    v_parent := musterd.first_waiting_parent(p_queue);
    -- The parent before its children, shared: callers work side by side, and an abort of the parent waits for us
    -- instead of meeting us half way.
    PERFORM 1 FROM musterd.tasks t WHERE t.id = v_parent FOR SHARE;
    WHILE p_left IS NULL OR p_left > 0 LOOP
        v_task := musterd.claim_sql_task(p_queue, v_parent);
        EXIT WHEN v_task.id IS NULL;
        PERFORM musterd.run_task(v_task, c.procedure) FROM musterd.commands c WHERE c.name = v_task.command;
        p_left := p_left - 1;
        -- Top-level tasks stop as soon as one of them waits for children: the next round is theirs.
        EXIT WHEN v_parent IS NULL AND musterd.first_waiting_parent(p_queue) IS NOT NULL;
    END LOOP;
END $$;
COMMENT ON PROCEDURE musterd.process_queue(text, int) IS 'Internal: one round of process_tasks in one queue.';

CREATE PROCEDURE musterd.process_tasks(p_queue text DEFAULT NULL, p_limit int DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
    v_queue text;
    v_left  int := p_limit;
BEGIN
    IF p_limit < 0 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = pg_catalog.format('p_limit is %s', p_limit), HINT = 'It is a number of tasks; left out, or null, for all.';
    ELSIF pg_catalog.current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_transaction_state',
            MESSAGE = pg_catalog.format('process_tasks needs READ COMMITTED, this transaction is %s',
                                        pg_catalog.upper(pg_catalog.current_setting('transaction_isolation'))),
            HINT = 'Start it with BEGIN ISOLATION LEVEL READ COMMITTED: an older snapshot cannot see that the last child has ended.';
    END IF;
    FOR v_queue IN
        SELECT DISTINCT t.queue FROM musterd.tasks t
         WHERE t.state IN ('queued', 'scheduled', 'waiting') AND (p_queue IS NULL OR t.queue = p_queue)
         ORDER BY t.queue
    LOOP
        EXIT WHEN v_left <= 0;
        CALL musterd.process_queue(v_queue, v_left);
    END LOOP;
END $$;
COMMENT ON PROCEDURE musterd.process_tasks(text, int) IS
    'Runs due tasks of kind sql with a registered procedure, in the caller''s transaction: one round (the children of the '
    'first waiting parent, or else top-level tasks until one waits) of one queue, or of each; at most p_limit tasks. An '
    'exception is a failed attempt and is retried later. Several sessions may call it: with p_limit => 1 and a queue then, '
    'since all locks last until the transaction ends and more of them may deadlock.';

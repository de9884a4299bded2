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
    v_end record;
BEGIN
    SELECT f.task_state, f.scope_id INTO v_end
      FROM musterd.finish_tasks(ARRAY[ROW (p_id, p_token, CASE WHEN p_error IS NULL THEN 'succeeded' ELSE 'failed' END, NULL, p_error,
                                           NULL, NULL, NULL)::musterd.task_outcome]) f
     WHERE f.task_id = p_id;
    -- Do not lock a parent that has other children open: callers would take turns. Should two of them end the last
    -- two children side by side, each sees the other's as open; a worker, or the next round, then ends the parent.
    IF v_end.scope_id <> p_id AND musterd.has_pending_children(v_end.scope_id) THEN
        PERFORM pg_notify('musterd_check', v_end.scope_id::text);
    ELSE
        PERFORM musterd.complete_parent_if_ready(v_end.scope_id);
    END IF;
    RETURN v_end.task_state;
END $$;
COMMENT ON FUNCTION musterd.end_task(bigint, uuid, text) IS
    'Ends a task held with this token (with children: makes it wait for them), starts its uncles, checks its parent. Returns '
    'the new state; null, and nothing happened, when the token is no longer the task''s.';

CREATE FUNCTION musterd.fail_attempt(p_id bigint, p_token uuid, p_error text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_task musterd.task_records;
BEGIN
    SELECT t.* INTO v_task FROM musterd.task_records t WHERE t.id = p_id;
    IF v_task.attempt >= COALESCE(v_task.max_attempts, 3) THEN
        PERFORM musterd.end_task(p_id, p_token, p_error);
    ELSE
        -- 1 s, 2 s, 4 s … at most 5 min, with jitter, as the worker's defaults have it.
        PERFORM musterd.finish_tasks(ARRAY[ROW (p_id, p_token, 'retry', NULL, p_error,
            LEAST(300, 2 ^ LEAST(v_task.attempt - 1, 10)) * (0.5 + random() / 2), NULL, NULL)::musterd.task_outcome]);
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

CREATE FUNCTION musterd.is_server_trouble(p_code text) RETURNS boolean
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    -- The same list as in src/handler/sql/blame.rs. 53200 and 53400 (out of memory or locks, over temp_file_limit) may be
    -- either's: a worker postpones a few of them before it charges attempts; here, where a round that is rolled back
    -- remembers nothing, they are the task's.
    SELECT left(p_code, 2) IN ('08', '53', '58') AND p_code NOT IN ('53200', '53400')
        OR left(p_code, 3) = '57P'
        OR p_code = '25006';
$$;
COMMENT ON FUNCTION musterd.is_server_trouble(text) IS
    'Internal: whether an exception with this SQLSTATE, raised while a procedure ran, is the server''s trouble (no room, read '
    'only, shutting down, I/O) and not a failed attempt.';

CREATE FUNCTION musterd.run_task(p_task musterd.claimed_task, p_procedure text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_proc    pg_catalog.regproc;
    v_code    text;
    v_message text;
    v_detail  text;
    v_hint    text;
    v_context text;
    v_fenced  boolean := false;
    -- Of the transaction, which goes on after this task.
    v_id      text := pg_catalog.current_setting('musterd.task_id', true);
    v_token   text := pg_catalog.current_setting('musterd.task_token', true);
BEGIN
    BEGIN  -- a subtransaction: the effects of a failed attempt vanish with it, and so do these settings
        PERFORM pg_catalog.set_config('musterd.task_id', p_task.id::text, true),
                pg_catalog.set_config('musterd.task_token', p_task.token::text, true);
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
        PERFORM pg_catalog.set_config('musterd.task_id', COALESCE(v_id, ''), true),
                pg_catalog.set_config('musterd.task_token', COALESCE(v_token, ''), true);
    EXCEPTION
        WHEN assert_failure OR OTHERS THEN
            GET STACKED DIAGNOSTICS v_code = RETURNED_SQLSTATE, v_message = MESSAGE_TEXT, v_detail = PG_EXCEPTION_DETAIL,
                                    v_hint = PG_EXCEPTION_HINT, v_context = PG_EXCEPTION_CONTEXT;
            -- The server's trouble is not the task's failure.
            IF musterd.is_server_trouble(v_code) THEN
                RAISE;
            END IF;
            IF NOT v_fenced THEN
                PERFORM musterd.fail_attempt(p_task.id, p_task.token,
                                             musterd.describe_error(v_code, v_message, v_detail, v_hint, v_context));
            END IF;
    END;
END $$;
COMMENT ON FUNCTION musterd.run_task(musterd.claimed_task, text) IS
    'Internal: one attempt of a claimed task, which musterd.task_id names meanwhile. An exception is a failed attempt.';

CREATE FUNCTION musterd.claim_sql_task(p_queue text, p_parent_id bigint) RETURNS musterd.claimed_task
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_ticket musterd.task_tickets;
    v_id     bigint;
    v_token  uuid := gen_random_uuid();
    v_task   musterd.claimed_task;
BEGIN
    LOOP
        SELECT k.* INTO v_ticket
          FROM musterd.task_tickets k JOIN musterd.commands c ON c.name = k.command
         WHERE k.queue = p_queue AND k.ready AND k.parent_id IS NOT DISTINCT FROM p_parent_id
           AND c.kind = 'sql' AND c.procedure IS NOT NULL
         ORDER BY k.priority, k.id LIMIT 1 FOR UPDATE OF k SKIP LOCKED;
        EXIT WHEN NOT FOUND;
        SELECT t.id INTO v_id FROM musterd.task_records t
         WHERE t.id = ANY (ARRAY (SELECT musterd.task_ids(v_ticket.tasks))) AND t.state = 'queued' AND t.ticket = v_ticket.number
         ORDER BY t.id LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED;
        EXIT WHEN v_id IS NULL AND EXISTS (
            SELECT FROM musterd.task_records t
             WHERE t.id = ANY (ARRAY (SELECT musterd.task_ids(v_ticket.tasks))) AND t.state = 'queued' AND t.ticket = v_ticket.number);
        IF v_id IS NULL OR v_ticket.count = 1 THEN
            DELETE FROM musterd.task_tickets k WHERE k.id = v_ticket.id;
            CONTINUE WHEN v_id IS NULL;
        ELSE
            UPDATE musterd.task_tickets k SET tasks = k.tasks - int8multirange(int8range(v_id, v_id + 1)), count = k.count - 1 WHERE k.id = v_ticket.id;
        END IF;
        IF v_ticket.keyed THEN
            UPDATE musterd.task_records t SET claimed_at = clock_timestamp() WHERE t.id = v_id;
        END IF;
        INSERT INTO musterd.task_claims (token, worker, queue, command, tasks, number, open, crashes, claimed_at)
        VALUES (v_token, 'process_tasks-' || pg_backend_pid(), p_queue, v_ticket.command, int8multirange(int8range(v_id, v_id + 1)),
                v_ticket.number, 1, v_ticket.crashes, clock_timestamp());
        SELECT c.* INTO v_task FROM musterd.claimed_tasks(ARRAY[v_token]) c;
        EXIT;
    END LOOP;
    RETURN v_task;
END $$;
COMMENT ON FUNCTION musterd.claim_sql_task(text, bigint) IS
    'Internal: the next due sql task of a queue among the children of a parent, or among top-level tasks. Null: none.';

CREATE FUNCTION musterd.first_waiting_parent(p_queue text) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_id bigint;
BEGIN
    SELECT p.id INTO v_id FROM musterd.task_records p
     WHERE p.state = 'waiting' AND p.queue = p_queue
       AND EXISTS (SELECT FROM musterd.task_records t JOIN musterd.commands c ON c.name = t.command
                    WHERE t.parent_id = p.id AND t.queue = p_queue AND t.state = 'queued' AND t.run_at <= clock_timestamp()
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
    v_parent bigint;
    v_task   musterd.claimed_task;
BEGIN
    IF EXISTS (SELECT FROM musterd.paused_queues q WHERE q.name = p_queue) THEN
        RETURN;
    END IF;
    PERFORM musterd.make_ready(p_queue);
    -- What two sessions left to each other, see end_task. A round of its own: the uncles of two scopes, locked one after
    -- the other in one transaction, would deadlock with a session that has them the other way round.
    SELECT p.id INTO v_parent FROM musterd.task_records p
     WHERE p.state = 'waiting' AND p.queue = p_queue AND NOT musterd.has_pending_children(p.id) ORDER BY p.id LIMIT 1;
    IF musterd.complete_parent_if_ready(v_parent) THEN
        RETURN;
    END IF;

    v_parent := musterd.first_waiting_parent(p_queue);
    -- The parent before its children, shared: callers work side by side, and an abort of the parent waits for us
    -- instead of meeting us half way.
    PERFORM 1 FROM musterd.task_records t WHERE t.id = v_parent FOR SHARE;
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
        SELECT t.queue FROM musterd.task_tickets t WHERE p_queue IS NULL OR t.queue OPERATOR(pg_catalog.=) p_queue
        UNION
        SELECT t.queue FROM musterd.task_records t WHERE t.state = 'waiting' AND (p_queue IS NULL OR t.queue OPERATOR(pg_catalog.=) p_queue)
         ORDER BY 1
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

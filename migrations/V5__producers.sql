-- What producers call, inside their own transactions: enqueue, spawn, submit_batch and their kin.
--
-- Rule of this file: a repeat is harmless. A key that exists already is looked up in a statement after the insert that
-- met it, because only a newer snapshot is sure to see it.

-- ------------------------------------------------------------------------------------------------------------------ tasks

CREATE FUNCTION musterd.find_by_idempotency_key(p_command text, p_key text, p_request_hash bytea) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_id   bigint;
    v_hash bytea;
BEGIN
    SELECT t.id, t.request_hash INTO v_id, v_hash FROM musterd.task_records t WHERE t.command = p_command AND t.idempotency_key = p_key;
    IF v_id IS NOT NULL AND v_hash IS DISTINCT FROM p_request_hash THEN
        RAISE EXCEPTION 'idempotency key "%" was used by task % with a different body', p_key, v_id
            USING ERRCODE = 'unique_violation', SCHEMA = 'musterd', TABLE = 'tasks', CONSTRAINT = 'tasks_idempotency_key',
                  HINT = 'Repeat the same request to get the same id, or choose a new key.';
    END IF;
    RETURN v_id;
END $$;
COMMENT ON FUNCTION musterd.find_by_idempotency_key(text, text, bytea) IS
    'Internal: the task or batch of this command with this key; null if there is none; 23505 if its request was another one.';

CREATE FUNCTION musterd.join_pending(p_id bigint, p_task musterd.task_records, p_replace boolean, p_waits bigint[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_replace THEN
        UPDATE musterd.task_records t
           SET payload = p_task.payload,
               priority = COALESCE(p_task.priority, t.priority),
               max_attempts = p_task.max_attempts,
               timeout = p_task.timeout,
               on_child_failure = p_task.on_child_failure,
               traceparent = p_task.traceparent,
               run_at = CASE WHEN t.not_before IS NULL THEN p_task.run_at ELSE t.run_at END,
               not_before = CASE WHEN t.not_before IS NULL THEN NULL ELSE p_task.run_at END,
               ticket = t.ticket + 1
         WHERE t.id = p_id;
        -- The ticket that it had is for another time or priority.
        PERFORM musterd.issue_tickets(ARRAY[p_id]);
    END IF;
    IF cardinality(p_waits) = 0 THEN
        RETURN;
    END IF;
    IF EXISTS (
        WITH RECURSIVE before (id) AS (
            SELECT unnest(p_waits)
            UNION
            SELECT w.after_id FROM before b JOIN musterd.task_waits w ON w.task_id = b.id)
        SELECT FROM before b WHERE b.id = p_id) THEN
        RAISE EXCEPTION 'task % (dedup key "%") would wait for itself', p_id, p_task.dedup_key
            USING ERRCODE = 'check_violation', HINT = 'Give it another dedup_key, or leave that task out of "after".';
    END IF;
    INSERT INTO musterd.task_waits (task_id, after_id) SELECT p_id, unnest(p_waits) ON CONFLICT DO NOTHING;
    UPDATE musterd.task_records t
       SET not_before = COALESCE(t.not_before, t.run_at), run_at = 'infinity', ticket = t.ticket + 1
     WHERE t.id = p_id;
END $$;
COMMENT ON FUNCTION musterd.join_pending(bigint, musterd.task_records, boolean, bigint[]) IS
    'Internal: a request meets the pending, locked task with its dedup key: replaces its body if asked, and adds its waits.';

CREATE FUNCTION musterd.add_task(p_task musterd.task_records, p_replace boolean, p_waits bigint[]) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_id    bigint;
    v_uncle boolean := cardinality(p_waits) > 0;
BEGIN
    LOOP
        INSERT INTO musterd.task_records (command, payload, queue, priority, state, run_at, not_before, max_attempts, timeout,
                                   dedup_key, idempotency_key, request_hash, on_child_failure, traceparent)
        VALUES (p_task.command, p_task.payload, p_task.queue, p_task.priority,
                'queued',
                CASE WHEN v_uncle THEN 'infinity' ELSE p_task.run_at END,
                CASE WHEN v_uncle THEN p_task.run_at END,
                p_task.max_attempts, p_task.timeout,
                p_task.dedup_key, p_task.idempotency_key, p_task.request_hash, p_task.on_child_failure, p_task.traceparent)
        ON CONFLICT DO NOTHING
        RETURNING id INTO v_id;
        IF v_id IS NOT NULL THEN
            INSERT INTO musterd.task_waits (task_id, after_id) SELECT v_id, unnest(p_waits);
            RETURN v_id;
        END IF;

        IF p_task.idempotency_key IS NOT NULL THEN
            v_id := musterd.find_by_idempotency_key(p_task.command, p_task.idempotency_key, p_task.request_hash);
            EXIT WHEN v_id IS NOT NULL;
        END IF;
        -- The lock makes claims pass it by until we commit: the run that serves this request sees what we wrote with it.
        IF p_replace OR v_uncle THEN
            SELECT t.id INTO v_id FROM musterd.task_records t
             WHERE t.command = p_task.command AND t.dedup_key = p_task.dedup_key AND t.claimed_at IS NULL AND t.state IN ('held', 'queued')
               FOR NO KEY UPDATE;
        ELSE
            SELECT t.id INTO v_id FROM musterd.task_records t
             WHERE t.command = p_task.command AND t.dedup_key = p_task.dedup_key AND t.claimed_at IS NULL AND t.state IN ('held', 'queued')
               FOR SHARE;
        END IF;
        IF v_id IS NOT NULL THEN
            IF p_replace OR v_uncle THEN
                PERFORM musterd.check_submitter(v_id);
            END IF;
            PERFORM musterd.join_pending(v_id, p_task, p_replace, p_waits);
            EXIT;
        END IF;
        -- What we met is gone or was claimed meanwhile: insert again.
    END LOOP;
    RETURN v_id;
END $$;
COMMENT ON FUNCTION musterd.add_task(musterd.task_records, boolean, bigint[]) IS
    'Internal: inserts a top-level task, or returns the one its idempotency or dedup key stands for.';

CREATE FUNCTION musterd.describe_task(p_command text, p_payload jsonb, p_queue text, p_priority int, p_run_at timestamptz,
                                      p_delay interval, p_max_attempts int, p_timeout interval, p_dedup_key text,
                                      p_idempotency_key text, p_traceparent text, p_on_child_failure text,
                                      p_after bigint[]) RETURNS musterd.task_records
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_task musterd.task_records;
BEGIN
    v_task.command := p_command;
    v_task.payload := COALESCE(p_payload, '{}');
    v_task.queue := p_queue;
    v_task.priority := p_priority;
    v_task.run_at := musterd.due_at(p_run_at, p_delay);
    v_task.max_attempts := p_max_attempts;
    v_task.timeout := p_timeout;
    v_task.dedup_key := p_dedup_key;
    v_task.idempotency_key := p_idempotency_key;
    v_task.traceparent := p_traceparent;
    v_task.on_child_failure := COALESCE(p_on_child_failure, 'wait');
    IF p_idempotency_key IS NOT NULL THEN
        -- Without the times: a client that retries computes them again. Without the trace: it is not the body.
        v_task.request_hash := sha256(convert_to(jsonb_build_array('task', p_command, v_task.payload, p_queue, p_priority,
            p_max_attempts, p_timeout, p_dedup_key, v_task.on_child_failure, p_after)::text, 'UTF8'));
    END IF;
    RETURN v_task;
END $$;
COMMENT ON FUNCTION musterd.describe_task(text, jsonb, text, int, timestamptz, interval, int, interval, text, text, text, text, bigint[]) IS
    'Internal: the arguments of enqueue and enqueue_after as a row of tasks, with the hash of the request.';

CREATE FUNCTION musterd.enqueue(command text, payload jsonb DEFAULT '{}', queue text DEFAULT NULL, priority int DEFAULT NULL,
                                run_at timestamptz DEFAULT NULL, delay interval DEFAULT NULL, max_attempts int DEFAULT NULL,
                                timeout interval DEFAULT NULL, dedup_key text DEFAULT NULL,
                                dedup_replace boolean DEFAULT false, idempotency_key text DEFAULT NULL,
                                traceparent text DEFAULT NULL, on_child_failure text DEFAULT 'wait') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN musterd.add_task(
        musterd.describe_task(command, payload, queue, priority, run_at, delay, max_attempts, timeout, dedup_key,
                              idempotency_key, traceparent, on_child_failure, NULL),
        dedup_replace, '{}');
END $$;
COMMENT ON FUNCTION musterd.enqueue(text, jsonb, text, int, timestamptz, interval, int, interval, text, boolean, text, text, text) IS
    'Adds a task and returns its id. dedup_key: joins the task of this command with that key that waits for its first claim '
    '(dedup_replace: and takes over its body; only of one that the caller submitted). idempotency_key: a repeat for the same command '
    'returns the same id, another body is a conflict (23505). '
    'on_child_failure: wait, or abort_siblings as soon as one of its children has failed.';

CREATE FUNCTION musterd.find_many_by_idempotency_key(p_command text, p_key text, p_request_hash bytea, p_count int) RETURNS bigint[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_ids   bigint[];
    v_other bigint;
BEGIN
    SELECT array_agg(t.id ORDER BY n), min(t.id) FILTER (WHERE t.request_hash IS DISTINCT FROM p_request_hash)
      INTO v_ids, v_other
      FROM generate_series(1, p_count) n JOIN musterd.task_records t ON t.command = p_command AND t.idempotency_key = p_key || '/' || n;
    IF v_other IS NOT NULL OR cardinality(v_ids) IS DISTINCT FROM p_count THEN
        RAISE EXCEPTION USING ERRCODE = 'unique_violation', SCHEMA = 'musterd', TABLE = 'tasks', CONSTRAINT = 'tasks_idempotency_key',
            MESSAGE = CASE WHEN v_other IS NULL
                          THEN format('tasks of idempotency key "%s" were deleted during this call', p_key)
                          ELSE format('idempotency key "%s" was used by task %s with a different body', p_key, v_other) END,
            HINT = 'Repeat the same request to get the same ids, or choose a new key.';
    END IF;
    RETURN v_ids;
END $$;
COMMENT ON FUNCTION musterd.find_many_by_idempotency_key(text, text, bytea, int) IS
    'Internal: the tasks of an enqueue_many of this command with this key, in the order of their payloads; 23505 if its request was another one.';

CREATE FUNCTION musterd.add_tasks_by_key(p_task musterd.task_records, p_payloads jsonb[], p_queue text) RETURNS bigint[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_hash  bytea;
    v_ids   bigint[];
    v_count int := cardinality(p_payloads);
BEGIN
    PERFORM musterd.check_key('idempotency_key with the number of a payload', p_task.idempotency_key || '/' || v_count);
    -- A hash of hashes: 32 bytes a payload, however large the payloads are. It stands for the whole call, so that the same key
    -- with fewer payloads, or with more, is a conflict.
    SELECT sha256(COALESCE(string_agg(sha256(convert_to(COALESCE(p.payload, '{}')::text, 'UTF8')), '' ORDER BY p.number), '')
           || convert_to(jsonb_build_array('tasks', p_task.command, p_queue, p_task.priority, p_task.max_attempts,
                                           p_task.timeout, p_task.on_child_failure)::text, 'UTF8'))
      INTO v_hash FROM unnest(p_payloads) WITH ORDINALITY p (payload, number);
    WITH added AS (
        INSERT INTO musterd.task_records (command, payload, queue, priority, run_at, max_attempts, timeout, idempotency_key,
                                   request_hash, on_child_failure, traceparent)
        SELECT p_task.command, COALESCE(p.payload, '{}'), p_task.queue, p_task.priority, p_task.run_at, p_task.max_attempts,
               p_task.timeout, p_task.idempotency_key || '/' || p.number, v_hash, p_task.on_child_failure, p_task.traceparent
          FROM unnest(p_payloads) WITH ORDINALITY p (payload, number) ORDER BY p.number
        ON CONFLICT DO NOTHING
        RETURNING id)
    SELECT COALESCE(array_agg(a.id ORDER BY a.id), '{}') INTO v_ids FROM added a;
    IF cardinality(v_ids) < v_count THEN
        -- A call of which only some keys were taken is refused there, and what it added goes with it.
        v_ids := musterd.find_many_by_idempotency_key(p_task.command, p_task.idempotency_key, v_hash, v_count);
    END IF;
    RETURN v_ids;
END $$;
COMMENT ON FUNCTION musterd.add_tasks_by_key(musterd.task_records, jsonb[], text) IS
    'Internal: enqueue_many with an idempotency key: inserts the tasks with the keys KEY/1, KEY/2 …, or returns those of an '
    'earlier call. p_queue: as the request has it.';

CREATE FUNCTION musterd.enqueue_many(command text, payloads jsonb[], queue text DEFAULT NULL, priority int DEFAULT NULL,
                                     run_at timestamptz DEFAULT NULL, delay interval DEFAULT NULL,
                                     max_attempts int DEFAULT NULL, timeout interval DEFAULT NULL,
                                     idempotency_key text DEFAULT NULL, traceparent text DEFAULT NULL,
                                     on_child_failure text DEFAULT 'wait') RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_task musterd.task_records;
BEGIN
    IF payloads IS NULL THEN
        RAISE EXCEPTION 'payloads is null' USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Give an array of jsonb, one element for each task; an empty array adds none.';
    ELSIF array_ndims(payloads) > 1 THEN
        RAISE EXCEPTION 'payloads has % dimensions, expected one', array_ndims(payloads)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A payload that is a list is a JSON array: ''[1, 2]''::jsonb.';
    END IF;
    v_task := musterd.describe_task(command, NULL, queue, priority, run_at, delay, max_attempts, timeout, NULL, NULL,
                                    traceparent, on_child_failure, NULL);
    v_task.idempotency_key := enqueue_many.idempotency_key;
    -- Once for all of them, where the trigger would ask for each. It also refuses a wrong argument beside an empty array.
    v_task.queue := COALESCE(queue, (SELECT c.queue FROM musterd.commands c WHERE c.name = enqueue_many.command), 'default');
    PERFORM musterd.check_task(v_task);
    IF v_task.idempotency_key IS NOT NULL THEN
        RETURN QUERY SELECT unnest(musterd.add_tasks_by_key(v_task, payloads, queue));
        RETURN;
    END IF;
    RETURN QUERY
        INSERT INTO musterd.task_records (command, payload, queue, priority, run_at, max_attempts, timeout, on_child_failure, traceparent)
        SELECT v_task.command, COALESCE(p.payload, '{}'), v_task.queue, v_task.priority, v_task.run_at, v_task.max_attempts,
               v_task.timeout, v_task.on_child_failure, v_task.traceparent
          FROM unnest(payloads) WITH ORDINALITY p (payload, number) ORDER BY p.number
        RETURNING id;
END $$;
COMMENT ON FUNCTION musterd.enqueue_many(text, jsonb[], text, int, timestamptz, interval, int, interval, text, text, text) IS
    'Adds a task for each payload, in one statement, and returns their ids in the order of the payloads. A null payload is {}. '
    'idempotency_key: the tasks get KEY/1, KEY/2 …; a repeat of the whole call returns the same ids, another body is a conflict (23505).';

CREATE FUNCTION musterd.enqueue_after(command text, payload jsonb DEFAULT '{}', after bigint[] DEFAULT NULL,
                                      queue text DEFAULT NULL, priority int DEFAULT NULL, run_at timestamptz DEFAULT NULL,
                                      delay interval DEFAULT NULL, max_attempts int DEFAULT NULL,
                                      timeout interval DEFAULT NULL, dedup_key text DEFAULT NULL,
                                      dedup_replace boolean DEFAULT false, idempotency_key text DEFAULT NULL,
                                      traceparent text DEFAULT NULL, on_child_failure text DEFAULT 'wait') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_task    musterd.task_records;
    v_missing bigint;
    v_waits   bigint[];
BEGIN
    IF COALESCE(cardinality(enqueue_after.after), 0) = 0 THEN
        RAISE EXCEPTION 'after is %: name the tasks or batches to wait for',
            CASE WHEN enqueue_after.after IS NULL THEN 'null' ELSE 'empty' END
            USING ERRCODE = 'invalid_parameter_value', HINT = 'What waits for nothing is a musterd.enqueue.';
    END IF;
    v_task := musterd.describe_task(command, payload, queue, priority, run_at, delay, max_attempts, timeout, dedup_key,
                                    idempotency_key, traceparent, on_child_failure, enqueue_after.after);
    PERFORM musterd.check_submitter(a.id) FROM unnest(enqueue_after.after) a (id);
    -- FOR SHARE: none of them can end between our look and our commit and miss the wait we add. What this transaction
    -- itself runs cannot, either.
    PERFORM 1 FROM musterd.task_records t
      WHERE t.id = ANY (ARRAY (SELECT a.id FROM unnest(enqueue_after.after) a (id) WHERE NOT musterd.runs_under(a.id)))
      ORDER BY t.id FOR SHARE;
    SELECT a.id INTO v_missing FROM unnest(enqueue_after.after) a (id)
     WHERE NOT EXISTS (SELECT FROM musterd.task_records t WHERE t.id = a.id) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'no task % to wait for', v_missing USING ERRCODE = 'no_data_found';
    END IF;
    v_waits := ARRAY (
        SELECT t.id FROM musterd.task_records t
         WHERE t.id = ANY (enqueue_after.after) AND NOT musterd.is_final(t.state) ORDER BY t.id);
    RETURN musterd.add_task(v_task, dedup_replace, v_waits);
END $$;
COMMENT ON FUNCTION musterd.enqueue_after(text, jsonb, bigint[], text, int, timestamptz, interval, int, interval, text, boolean, text, text, text) IS
    'Adds an uncle: a top-level task that starts only after the named tasks have ended, however they end. Those that have '
    'ended already are not waited for.';

CREATE FUNCTION musterd.spawn(p_command text, p_payload jsonb DEFAULT '{}', p_parent_id bigint DEFAULT NULL,
                              p_priority int DEFAULT NULL, p_child_key text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_id bigint;
BEGIN
    -- First the look: a repeat must get its answer even when the parent has ended since.
    SELECT t.id INTO v_id FROM musterd.task_records t WHERE t.parent_id = p_parent_id AND t.child_key = p_child_key;
    IF v_id IS NULL THEN
        IF p_parent_id IS NOT NULL THEN
            PERFORM musterd.check_submitter(p_parent_id);
        END IF;
        INSERT INTO musterd.task_records (command, payload, parent_id, priority, child_key)
        VALUES (p_command, p_payload, p_parent_id, p_priority, p_child_key)
        ON CONFLICT (parent_id, child_key) WHERE parent_id IS NOT NULL DO NOTHING
        RETURNING id INTO v_id;
    END IF;
    IF v_id IS NULL THEN
        SELECT t.id INTO v_id FROM musterd.task_records t WHERE t.parent_id = p_parent_id AND t.child_key = p_child_key;
    END IF;
    RETURN v_id;
END $$;
COMMENT ON FUNCTION musterd.spawn(text, jsonb, bigint, int, text) IS
    'Adds a child to a living task, in its queue and priority unless given others, and returns its id. With p_child_key a '
    'repeat returns the same child. Without a parent it is a plain enqueue.';

-- ---------------------------------------------------------------------------------------------------------------- batches

CREATE FUNCTION musterd.submit_batch(command text, rows jsonb[], queue text DEFAULT NULL, context jsonb DEFAULT '{}',
                                     priority int DEFAULT NULL, idempotency_key text DEFAULT NULL,
                                     hold boolean DEFAULT false, max_attempts int DEFAULT NULL,
                                     row_timeout interval DEFAULT NULL, max_failed int DEFAULT 0,
                                     max_failed_percent real DEFAULT NULL, on_done text DEFAULT NULL,
                                     on_budget text DEFAULT NULL, parent_id bigint DEFAULT NULL,
                                     traceparent text DEFAULT NULL, keep interval DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_rows text[] := musterd.row_texts(submit_batch.rows);
    v_new  bigint;
    v_id   bigint;
    v_hash bytea;
BEGIN
    IF idempotency_key IS NOT NULL THEN
        -- A hash of hashes: 32 bytes a row, however large the rows are. jsonb has one text per value.
        SELECT sha256(COALESCE(string_agg(sha256(convert_to(r.input, 'UTF8')), '' ORDER BY r.line), '')
               || convert_to(jsonb_build_array('batch', command, queue, context, priority, hold, max_attempts, row_timeout,
                                               max_failed, max_failed_percent, on_done, on_budget, parent_id, keep)::text, 'UTF8'))
          INTO v_hash FROM unnest(v_rows) WITH ORDINALITY r (input, line);
    END IF;
    IF parent_id IS NOT NULL THEN
        PERFORM musterd.check_submitter(parent_id);
    END IF;
    v_new := musterd.reserve_batch_id();
    v_id := musterd.open_batch(v_new, command, queue, context, priority, idempotency_key, hold, max_attempts, row_timeout,
                               max_failed, max_failed_percent, on_done, on_budget, parent_id, traceparent,
                               cardinality(v_rows), v_hash, keep);
    IF v_id = v_new THEN
        PERFORM musterd.cut_chunks(v_new, 0, v_rows);
    END IF;
    RETURN v_id;
END $$;
COMMENT ON FUNCTION musterd.submit_batch(text, jsonb[], text, jsonb, int, text, boolean, int, interval, int, real, text, text, bigint, text, interval) IS
    'Adds a batch with its rows and returns its id. A repeat with the same idempotency_key returns the same id; with another '
    'body it is a conflict (23505). An empty batch ends at once, unless held.';

CREATE FUNCTION musterd.submit_batch(command text, rows jsonb, queue text DEFAULT NULL, context jsonb DEFAULT '{}',
                                     priority int DEFAULT NULL, idempotency_key text DEFAULT NULL,
                                     hold boolean DEFAULT false, max_attempts int DEFAULT NULL,
                                     row_timeout interval DEFAULT NULL, max_failed int DEFAULT 0,
                                     max_failed_percent real DEFAULT NULL, on_done text DEFAULT NULL,
                                     on_budget text DEFAULT NULL, parent_id bigint DEFAULT NULL,
                                     traceparent text DEFAULT NULL, keep interval DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN musterd.submit_batch(command, musterd.row_array(submit_batch.rows), queue, context, priority, idempotency_key,
                                hold, max_attempts, row_timeout, max_failed, max_failed_percent, on_done, on_budget,
                                parent_id, traceparent, keep);
END $$;
COMMENT ON FUNCTION musterd.submit_batch(text, jsonb, text, jsonb, int, text, boolean, int, interval, int, real, text, text, bigint, text, interval) IS
    'The same, with the rows as one JSON array.';

CREATE FUNCTION musterd.submit_batch(command text, rows json, queue text DEFAULT NULL, context jsonb DEFAULT '{}',
                                     priority int DEFAULT NULL, idempotency_key text DEFAULT NULL,
                                     hold boolean DEFAULT false, max_attempts int DEFAULT NULL,
                                     row_timeout interval DEFAULT NULL, max_failed int DEFAULT 0,
                                     max_failed_percent real DEFAULT NULL, on_done text DEFAULT NULL,
                                     on_budget text DEFAULT NULL, parent_id bigint DEFAULT NULL,
                                     traceparent text DEFAULT NULL, keep interval DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN musterd.submit_batch(command, musterd.row_array(submit_batch.rows::text), queue, context, priority, idempotency_key,
                                hold, max_attempts, row_timeout, max_failed, max_failed_percent, on_done, on_budget,
                                parent_id, traceparent, keep);
END $$;
COMMENT ON FUNCTION musterd.submit_batch(text, json, text, jsonb, int, text, boolean, int, interval, int, real, text, text, bigint, text, interval) IS
    'The same, with the rows as one JSON array of type json.';

-- Without this form, a literal or an untyped parameter would fit two others and be refused as not unique.
CREATE FUNCTION musterd.submit_batch(command text, rows text, queue text DEFAULT NULL, context jsonb DEFAULT '{}',
                                     priority int DEFAULT NULL, idempotency_key text DEFAULT NULL,
                                     hold boolean DEFAULT false, max_attempts int DEFAULT NULL,
                                     row_timeout interval DEFAULT NULL, max_failed int DEFAULT 0,
                                     max_failed_percent real DEFAULT NULL, on_done text DEFAULT NULL,
                                     on_budget text DEFAULT NULL, parent_id bigint DEFAULT NULL,
                                     traceparent text DEFAULT NULL, keep interval DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN musterd.submit_batch(command, musterd.row_array(submit_batch.rows), queue, context, priority, idempotency_key,
                                hold, max_attempts, row_timeout, max_failed, max_failed_percent, on_done, on_budget,
                                parent_id, traceparent, keep);
END $$;
COMMENT ON FUNCTION musterd.submit_batch(text, text, text, jsonb, int, text, boolean, int, interval, int, real, text, text, bigint, text, interval) IS
    'The same, with the rows as the text of a JSON array. A literal without a type comes here: PostgreSQL prefers text.';

CREATE FUNCTION musterd.append_rows(batch_id bigint, rows jsonb[], idempotency_key text DEFAULT NULL) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_rows text[] := musterd.row_texts(append_rows.rows);
    v_hash bytea;
    v_then int;
BEGIN
    PERFORM musterd.check_submitter(append_rows.batch_id);
    IF append_rows.idempotency_key IS NULL THEN
        RETURN musterd.append_texts(append_rows.batch_id, v_rows);
    END IF;
    SELECT sha256(COALESCE(string_agg(sha256(convert_to(r.input, 'UTF8')), '' ORDER BY r.line), ''))
      INTO v_hash FROM unnest(v_rows) WITH ORDINALITY r (input, line);
    v_then := musterd.find_append(append_rows.batch_id, append_rows.idempotency_key, v_hash);
    RETURN COALESCE(v_then, musterd.remember_append(append_rows.batch_id, append_rows.idempotency_key, v_hash,
                                                    musterd.append_texts(append_rows.batch_id, v_rows)));
END $$;
COMMENT ON FUNCTION musterd.append_rows(bigint, jsonb[], text) IS
    'Adds rows behind the last line of a batch that is held or running; returns its new number of rows. Refused once the '
    'batch has ended or is being aborted. With an idempotency_key a repeat adds nothing and returns the same number; with other rows it '
    'is a conflict (23505). Holds the batch''s row lock until the transaction ends: commit soon.';

CREATE FUNCTION musterd.append_rows(batch_id bigint, rows jsonb, idempotency_key text DEFAULT NULL) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN musterd.append_rows(append_rows.batch_id, musterd.row_array(append_rows.rows), append_rows.idempotency_key);
END $$;
COMMENT ON FUNCTION musterd.append_rows(bigint, jsonb, text) IS 'The same, with the rows as one JSON array.';

CREATE FUNCTION musterd.append_rows(batch_id bigint, rows json, idempotency_key text DEFAULT NULL) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN musterd.append_rows(append_rows.batch_id, musterd.row_array(append_rows.rows::text), append_rows.idempotency_key);
END $$;
COMMENT ON FUNCTION musterd.append_rows(bigint, json, text) IS 'The same, with the rows as one JSON array of type json.';

CREATE FUNCTION musterd.append_rows(batch_id bigint, rows text, idempotency_key text DEFAULT NULL) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN musterd.append_rows(append_rows.batch_id, musterd.row_array(append_rows.rows), append_rows.idempotency_key);
END $$;
COMMENT ON FUNCTION musterd.append_rows(bigint, text, text) IS 'The same, with the rows as the text of a JSON array.';

-- ---------------------------------------------------------------------------------------------------------------- commands

CREATE FUNCTION musterd.register_command(name text, queue text DEFAULT 'default', kind text DEFAULT 'sql',
                                         procedure text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM musterd.check_name('name', register_command.name);
    PERFORM musterd.check_name('queue', COALESCE(register_command.queue, 'default'));
    IF register_command.kind NOT IN ('sql', 'http', 'exec', 'builtin') THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('kind is "%s"', left(register_command.kind, 100)),
            HINT = 'It is sql, http, exec or builtin.';
    END IF;
    INSERT INTO musterd.commands AS c (name, queue, kind, procedure)
    VALUES (register_command.name, COALESCE(register_command.queue, 'default'), COALESCE(register_command.kind, 'sql'),
            register_command.procedure)
    ON CONFLICT (name) DO UPDATE
       SET queue = excluded.queue, kind = excluded.kind, procedure = excluded.procedure, updated_at = now()
     -- Ten replicas that start with one configuration write it once.
     WHERE (c.queue, c.kind, c.procedure) IS DISTINCT FROM (excluded.queue, excluded.kind, excluded.procedure);
END $$;
COMMENT ON FUNCTION musterd.register_command(text, text, text, text) IS
    'Declares a command: the queue its tasks go to by default, its kind, and for kind sql the procedure (bigint, jsonb) to '
    'call, with its schema. Not for producers: a registered procedure is what workers run.';

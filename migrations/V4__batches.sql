-- The life of a batch in its order: opened with its chunks, grown, stopped, audited, ended once, healed, run again.
--
-- Rule of this file: a function that changes a batch locks its row first and decides in the next statement; and a batch that was not
-- aborted ends only when its outcomes and failures are disjoint and together all its lines.

-- --------------------------------------------------------------------------------------------------------- how it is opened

CREATE FUNCTION musterd.reserve_batch_id() RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT nextval(pg_get_serial_sequence('musterd.task_records', 'id'));
$$;
COMMENT ON FUNCTION musterd.reserve_batch_id() IS 'An id for open_batch, so that rows can be copied in before the batch exists.';

CREATE FUNCTION musterd.check_batch(p_max_attempts int, p_row_timeout interval, p_max_failed int, p_max_failed_percent real,
                                    p_on_done text, p_on_budget text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM musterd.check_limits('', p_max_attempts, 'row_timeout', p_row_timeout);
    IF p_max_failed < 0 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('max_failed is %s', p_max_failed),
            HINT = 'It is a number of rows, 0 or more.';
    ELSIF p_max_failed_percent NOT BETWEEN 0 AND 100 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('max_failed_percent is %s', p_max_failed_percent),
            HINT = 'It is 0 to 100.';
    ELSIF p_on_budget NOT IN ('hold', 'abort') THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('on_budget is "%s"', left(p_on_budget, 100)),
            HINT = 'It is hold or abort; left out, the batch runs to its end.';
    ELSIF p_on_done IS NOT NULL THEN
        PERFORM musterd.check_name('on_done', p_on_done);
    END IF;
END $$;
COMMENT ON FUNCTION musterd.check_batch(int, interval, int, real, text, text) IS 'Internal: refuses what cannot be a batch.';

CREATE FUNCTION musterd.check_keep(p_keep interval) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_keep <= interval '0' OR p_keep > interval '365250 days' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('keep is %s', p_keep),
            HINT = 'It is above zero and at most 1000 years; left out, the data stays as long as [retention] says. For as long as you like: musterd.hold_data(id).';
    END IF;
END $$;
COMMENT ON FUNCTION musterd.check_keep(interval) IS 'Internal: refuses a time that data cannot be kept for.';

CREATE FUNCTION musterd.open_batch(p_id bigint, p_command text, p_queue text DEFAULT NULL, p_context jsonb DEFAULT '{}',
                                   p_priority int DEFAULT NULL, p_idempotency_key text DEFAULT NULL,
                                   p_hold boolean DEFAULT false, p_max_attempts int DEFAULT NULL,
                                   p_row_timeout interval DEFAULT NULL, p_max_failed int DEFAULT 0,
                                   p_max_failed_percent real DEFAULT NULL, p_on_done text DEFAULT NULL,
                                   p_on_budget text DEFAULT NULL, p_parent_id bigint DEFAULT NULL,
                                   p_traceparent text DEFAULT NULL, p_rows int DEFAULT 0,
                                   p_request_hash bytea DEFAULT NULL, p_keep interval DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_task musterd.task_records;
    v_hold boolean := COALESCE(p_hold, false);
    v_id   bigint;
BEGIN
    PERFORM musterd.check_batch(p_max_attempts, p_row_timeout, p_max_failed, p_max_failed_percent, p_on_done, p_on_budget);
    PERFORM musterd.check_keep(p_keep);
    LOOP
        INSERT INTO musterd.task_records (id, parent_id, queue, command, payload, priority, state, run_at, idempotency_key,
                                   request_hash, traceparent)
        VALUES (p_id, p_parent_id, p_queue, p_command, p_context, p_priority,
                -- Its rows may have taken a while to come; before that nothing was due.
                CASE WHEN v_hold THEN 'held' ELSE 'running' END::musterd.state, clock_timestamp(), p_idempotency_key,
                p_request_hash, p_traceparent)
        ON CONFLICT (command, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
        RETURNING * INTO v_task;
        EXIT WHEN v_task.id IS NOT NULL;
        v_id := musterd.find_by_idempotency_key(p_command, p_idempotency_key, p_request_hash);
        IF v_id IS NOT NULL THEN
            RETURN v_id;
        END IF;
    END LOOP;

    INSERT INTO musterd.batches (id, queue, command, priority, open, rows, max_attempts, row_timeout, max_failed,
                                 max_failed_percent, on_done, on_budget, keep)
    VALUES (p_id, v_task.queue, p_command, v_task.priority, NOT v_hold, p_rows, p_max_attempts, p_row_timeout,
            COALESCE(p_max_failed, 0), p_max_failed_percent, p_on_done, p_on_budget, p_keep);
    IF v_hold THEN
        RETURN p_id;
    ELSIF p_rows > 0 THEN
        PERFORM pg_notify('musterd_wake', v_task.queue);
    ELSIF musterd.complete_or_ask(p_id, 1, 0, 0, 0) = 'completed' AND p_parent_id IS NOT NULL THEN
        PERFORM pg_notify('musterd_check', p_parent_id::text);
    END IF;
    RETURN p_id;
END $$;
COMMENT ON FUNCTION musterd.open_batch(bigint, text, text, jsonb, int, text, boolean, int, interval, int, real, text, text, bigint, text, int, bytea, interval) IS
    'Makes the batch for chunks that this transaction has written, or will write, under an id from reserve_batch_id. Returns '
    'that id; another id when the idempotency key stands for an earlier batch: roll back, it has these rows already. '
    'An empty batch that is not held ends here.';

-- ---------------------------------------------------------------------------------------------------------- rows as text

CREATE FUNCTION musterd.row_texts(p_rows jsonb[]) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    v_most  int := 16 * 1024 * 1024;
    v_texts text[];
    v_row   bigint;
    v_size  int;
BEGIN
    IF p_rows IS NULL THEN
        RAISE EXCEPTION 'rows is null; an empty batch has an empty array' USING ERRCODE = 'null_value_not_allowed';
    ELSIF array_ndims(p_rows) > 1 THEN
        RAISE EXCEPTION 'rows has % dimensions, expected one', array_ndims(p_rows) USING ERRCODE = 'array_subscript_error';
    ELSIF array_position(p_rows, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'row % is null', array_position(p_rows, NULL) - array_lower(p_rows, 1) + 1
            USING ERRCODE = 'null_value_not_allowed', HINT = 'JSON null is allowed: ''null''::jsonb.';
    END IF;
    BEGIN
        v_texts := ARRAY (SELECT r.input::text FROM unnest(p_rows) WITH ORDINALITY r (input, line) ORDER BY r.line);
    EXCEPTION
        WHEN program_limit_exceeded OR out_of_memory THEN
            RAISE EXCEPTION 'a row, or all rows together, are more than PostgreSQL can write as text'
                USING ERRCODE = 'invalid_parameter_value',
                      HINT = 'Numbers such as 1e131071 are written out: send them as strings. Split a large batch with append_rows.';
    END;
    SELECT t.line, octet_length(t.input) INTO v_row, v_size
      FROM unnest(v_texts) WITH ORDINALITY t (input, line) WHERE octet_length(t.input) > v_most ORDER BY t.line LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'row % has % bytes of JSON, at most % are allowed', v_row, v_size, v_most
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Store large values elsewhere and pass where they are.';
    END IF;
    -- The depth that every other door allows; two characters a level at least.
    SELECT t.line INTO v_row FROM ROWS FROM (unnest(v_texts), unnest(p_rows)) WITH ORDINALITY t (input, json, line)
     WHERE octet_length(t.input) > 200 AND jsonb_path_exists(t.json, 'strict $.**{100} ? (@.type() == "object" || @.type() == "array")')
     ORDER BY t.line LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'row % has arrays and objects nested deeper than 100 levels', v_row
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Flatten the row, or send the inner part as a string.';
    END IF;
    RETURN v_texts;
END $$;
COMMENT ON FUNCTION musterd.row_texts(jsonb[]) IS
    'Internal: rows as the lines of chunks; refuses what cannot be a row, naming it. The text of a jsonb has no raw line feed.';

CREATE FUNCTION musterd.row_array(p_rows jsonb) RETURNS jsonb[]
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_rows IS NULL THEN
        RAISE EXCEPTION 'rows is null: give a JSON array; an empty batch has an empty one'
            USING ERRCODE = 'null_value_not_allowed';
    ELSIF jsonb_typeof(p_rows) <> 'array' THEN
        RAISE EXCEPTION 'rows is a JSON %, expected an array', jsonb_typeof(p_rows)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'One row is an array of one. An SQL array as a literal needs its type: ''{…}''::jsonb[].';
    END IF;
    RETURN ARRAY (SELECT e.value FROM jsonb_array_elements(p_rows) WITH ORDINALITY e (value, line) ORDER BY e.line);
END $$;
COMMENT ON FUNCTION musterd.row_array(jsonb) IS 'Internal: the elements of a JSON array.';

CREATE FUNCTION musterd.row_array(p_rows text) RETURNS jsonb[]
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_rows jsonb;
BEGIN
    BEGIN
        v_rows := p_rows::jsonb;
    EXCEPTION
        -- The server's details quote the text, which may be a secret; its message does not.
        WHEN data_exception OR program_limit_exceeded THEN
            RAISE EXCEPTION 'rows is not JSON that can be stored: %', SQLERRM
                USING ERRCODE = 'invalid_parameter_value',
                      HINT = 'Rows given as text are a JSON array. An SQL array as a literal needs its type: ''{…}''::jsonb[].';
    END;
    RETURN musterd.row_array(v_rows);
END $$;
COMMENT ON FUNCTION musterd.row_array(text) IS 'Internal: the elements of a JSON array that is still text.';

CREATE FUNCTION musterd.cut_chunks(p_batch bigint, p_after int, p_rows text[]) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp SET jit = off AS $$
    INSERT INTO musterd.chunks (batch_id, first_line, last_line, inputs)
    SELECT p_batch, p_after + min(s.line), p_after + max(s.line), string_agg(s.input, E'\n' ORDER BY s.line)
      FROM (SELECT r.line, r.input, r.run,
                   -- Counted without the row itself: the one that passes the limit still belongs to the chunk.
                   (sum(octet_length(r.input) + 1) OVER (PARTITION BY r.run ORDER BY r.line) - octet_length(r.input) - 1) / 262144 AS piece
              FROM (SELECT u.line::int AS line, u.input, (u.line - 1) / 500 AS run
                      FROM unnest(p_rows) WITH ORDINALITY u (input, line)) r) s
     GROUP BY s.run, s.piece
$$;
COMMENT ON FUNCTION musterd.cut_chunks(bigint, int, text[]) IS
    'Internal: stores rows as chunks of a batch, behind line p_after: at most 500 lines and 256 KiB and the row that passes it.';

-- ------------------------------------------------------------------------------------------------------------ how it grows

CREATE FUNCTION musterd.lock_for_append(p_id bigint) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_batch musterd.batches;
BEGIN
    PERFORM 1 FROM musterd.batches b WHERE b.id = p_id FOR NO KEY UPDATE;
    SELECT b.* INTO v_batch FROM musterd.batches b WHERE b.id = p_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no batch %', p_id USING ERRCODE = 'no_data_found';
    ELSIF v_batch.summarized_at IS NOT NULL THEN
        RAISE EXCEPTION 'batch % has ended and takes no more rows', p_id
            USING ERRCODE = 'check_violation', HINT = 'Submit them as a new batch.';
    ELSIF v_batch.aborting THEN
        RAISE EXCEPTION 'batch % is being aborted and takes no more rows', p_id USING ERRCODE = 'check_violation';
    END IF;
    RETURN v_batch.rows;
END $$;
COMMENT ON FUNCTION musterd.lock_for_append(bigint) IS
    'Internal: locks a batch that may still grow and returns its number of rows; raises when it may not.';

CREATE FUNCTION musterd.find_append(p_id bigint, p_key text, p_request_hash bytea) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_known musterd.appends;
BEGIN
    PERFORM musterd.check_key('idempotency_key', p_key);
    -- Under the batch's lock: of two that bring the same key the second finds what the first has written. Also of one that has ended:
    -- a repeat must get its answer.
    PERFORM 1 FROM musterd.batches b WHERE b.id = p_id FOR NO KEY UPDATE;
    SELECT a.* INTO v_known FROM musterd.appends a WHERE a.batch_id = p_id AND a.idempotency_key = p_key;
    IF v_known.request_hash IS DISTINCT FROM p_request_hash AND v_known.batch_id IS NOT NULL THEN
        RAISE EXCEPTION 'idempotency key "%" was used to append other rows to batch %', p_key, p_id
            USING ERRCODE = 'unique_violation', SCHEMA = 'musterd', TABLE = 'appends', CONSTRAINT = 'appends_pkey',
                  HINT = 'Repeat the same rows to get the same answer, or choose a new key.';
    END IF;
    RETURN v_known.rows;
END $$;
COMMENT ON FUNCTION musterd.find_append(bigint, text, bytea) IS
    'Internal: locks a batch; the number of rows it had after the append with this key, null if there was none, 23505 if it had other rows.';

CREATE FUNCTION musterd.remember_append(p_id bigint, p_key text, p_request_hash bytea, p_rows int) RETURNS int
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO musterd.appends (batch_id, idempotency_key, request_hash, rows) VALUES (p_id, p_key, p_request_hash, p_rows) RETURNING rows
$$;
COMMENT ON FUNCTION musterd.remember_append(bigint, text, bytea, int) IS 'Internal: writes what find_append finds.';

CREATE FUNCTION musterd.grow_batch(p_id bigint, p_added bigint) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_batch musterd.batches;
BEGIN
    UPDATE musterd.batches b SET rows = b.rows + p_added WHERE b.id = p_id RETURNING b.* INTO v_batch;
    IF v_batch.open AND p_added > 0 THEN
        PERFORM pg_notify('musterd_wake', v_batch.queue);
    END IF;
    RETURN v_batch.rows;
END $$;
COMMENT ON FUNCTION musterd.grow_batch(bigint, bigint) IS 'Internal: counts rows that were added under lock_for_append.';

CREATE FUNCTION musterd.append_texts(p_id bigint, p_rows text[]) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_last int := musterd.lock_for_append(p_id);
BEGIN
    PERFORM musterd.cut_chunks(p_id, v_last, p_rows);
    RETURN musterd.grow_batch(p_id, cardinality(p_rows));
END $$;
COMMENT ON FUNCTION musterd.append_texts(bigint, text[]) IS
    'Internal: append_rows for rows that were checked: JSON that jsonb can hold, without raw line feeds.';

CREATE FUNCTION musterd.extend_batch(p_id bigint, p_staged regclass, p_idempotency_key text DEFAULT NULL,
                                     p_request_hash bytea DEFAULT NULL, OUT rows int, OUT repeated boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_last  int;
    v_added bigint;
BEGIN
    repeated := false;
    IF p_idempotency_key IS NOT NULL THEN
        rows := musterd.find_append(p_id, p_idempotency_key, p_request_hash);
        IF rows IS NOT NULL THEN
            repeated := true;
            RETURN;
        END IF;
    END IF;
    v_last := musterd.lock_for_append(p_id);
    EXECUTE format('WITH added AS (
                        INSERT INTO musterd.chunks (batch_id, first_line, last_line, inputs)
                        SELECT $1, $2 + s.first_line, $2 + s.last_line, s.inputs FROM %s s
                        RETURNING last_line - first_line + 1 AS rows)
                    SELECT COALESCE(sum(a.rows), 0) FROM added a', p_staged)
      INTO v_added USING p_id, v_last;
    rows := musterd.grow_batch(p_id, v_added);
    IF p_idempotency_key IS NOT NULL THEN
        PERFORM musterd.remember_append(p_id, p_idempotency_key, p_request_hash, rows);
    END IF;
END $$;
COMMENT ON FUNCTION musterd.extend_batch(bigint, regclass, text, bytea) IS
    'append_rows for chunks that were copied into a temporary table (first_line int, last_line int, inputs text) first, so '
    'that the copy does not hold the batch''s lock. Their lines count from 1 and are moved behind the last line of the batch. '
    'repeated: an append with this key had added them before, and rows is what the batch had then.';

-- -------------------------------------------------------------------------------------------------------- how it is stopped

CREATE FUNCTION musterd.drop_free_blocks(p_batch_id bigint) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_dropped int;
BEGIN
    -- Ascending, like a flush: a late flush may hold a block that was freed since.
    PERFORM 1 FROM musterd.blocks k WHERE k.batch_id = p_batch_id AND k.worker IS NULL ORDER BY k.id FOR UPDATE;
    DELETE FROM musterd.blocks k WHERE k.batch_id = p_batch_id AND k.worker IS NULL;
    GET DIAGNOSTICS v_dropped = ROW_COUNT;
    RETURN v_dropped;
END $$;
COMMENT ON FUNCTION musterd.drop_free_blocks(bigint) IS
    'Internal: deletes the free blocks of a batch whose row the caller has locked. Returns how many.';

CREATE FUNCTION musterd.abort_batch(p_id bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE musterd.batches b SET aborting = true, open = false WHERE b.id = p_id AND b.summarized_at IS NULL;
    UPDATE musterd.task_records t SET state = 'running' WHERE t.id = p_id AND t.state = 'held';
    PERFORM musterd.drop_free_blocks(p_id);
    PERFORM pg_notify('musterd_abort', p_id::text);
END $$;
COMMENT ON FUNCTION musterd.abort_batch(bigint) IS
    'Internal: closes a batch whose rows in batches and tasks the caller has locked, and tells the workers. Ends nothing.';

CREATE FUNCTION musterd.failed_now(p_batch musterd.batches) RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT COALESCE(sum(o.failed), 0) FROM musterd.outcomes o
     WHERE o.batch_id = p_batch.id AND o.generation = p_batch.generation
$$;
COMMENT ON FUNCTION musterd.failed_now(musterd.batches) IS 'Internal: the rows of a batch that have failed in its current generation.';

-- ------------------------------------------------------------------------------------------------- some rows first: a canary

CREATE FUNCTION musterd.canary_size(p_rows text, p_of int) RETURNS int
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_size numeric;
BEGIN
    IF p_rows ~ '^[0-9]{1,9}$' THEN
        v_size := p_rows::numeric;
    ELSIF p_rows ~ '^[0-9]{1,3}(\.[0-9]{1,6})?%$' AND rtrim(p_rows, '%')::numeric <= 100 THEN
        v_size := ceil(p_of * rtrim(p_rows, '%')::numeric / 100);
    END IF;
    IF v_size IS NULL OR (v_size < 1 AND p_of > 0) OR LEAST(v_size, p_of) > 1000000 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('canary is "%s"', left(p_rows, 100)),
            HINT = 'It is a number of rows (50) or a share of them (2%), at least one row and at most 1,000,000.';
    END IF;
    RETURN LEAST(v_size, p_of);
END $$;
COMMENT ON FUNCTION musterd.canary_size(text, int) IS 'Internal: how many of the rows of a batch are its canary.';

CREATE FUNCTION musterd.canary_limit(p_auto_release text) RETURNS real
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_percent text := substring(p_auto_release FROM '^ *failed *< *([0-9]{1,3}(?:\.[0-9]{1,6})?) *% *$');
BEGIN
    IF p_auto_release IS NOT NULL AND COALESCE(v_percent::real NOT BETWEEN 0.000001 AND 100, true) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('auto_release is "%s"', left(p_auto_release, 100)), HINT = 'It is such as failed<0.5%: the share of the canary.';
    END IF;
    RETURN v_percent::real;
END $$;
COMMENT ON FUNCTION musterd.canary_limit(text) IS 'Internal: the percentage in a condition such as failed<0.5%.';

CREATE FUNCTION musterd.open_rest(p_batch musterd.batches) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    v_size int := LEAST(COALESCE((SELECT q.block_size FROM musterd.queues q WHERE q.name = p_batch.queue), 500), 500);
BEGIN
    -- A canary of the first rows has moved the cursor behind itself. One that was spread leaves gaps that no cursor can follow.
    IF p_batch.next_line = 1 THEN
        WITH taken AS (
            SELECT (l.line - 1) / v_size AS block, range_agg(int4range(l.line, l.line + 1)) AS lines
              FROM (SELECT musterd.lines_of(k.lines) AS line FROM musterd.blocks k WHERE k.batch_id = p_batch.id
                    UNION ALL
                    SELECT generate_series(lower(r.lines), upper(r.lines) - 1) FROM musterd.recorded_lines r WHERE r.batch_id = p_batch.id) l
             GROUP BY 1)
        INSERT INTO musterd.blocks (batch_id, lines, rows, generation, queue, command, priority)
        SELECT p_batch.id, x.lines, musterd.count_lines(x.lines), p_batch.generation, p_batch.queue, p_batch.command, p_batch.priority
          FROM generate_series(0, (p_batch.rows - 1) / v_size) g
          LEFT JOIN taken t ON t.block = g
         CROSS JOIN LATERAL (SELECT int4multirange(int4range(g * v_size + 1, LEAST((g + 1) * v_size, p_batch.rows) + 1))
                                    - COALESCE(t.lines, '{}') AS lines) x
         WHERE NOT isempty(x.lines)
         ORDER BY g;
    END IF;
    UPDATE musterd.batches b
       SET canary_only = false, next_line = CASE WHEN p_batch.next_line = 1 THEN b.rows + 1 ELSE b.next_line END
     WHERE b.id = p_batch.id;
    PERFORM pg_notify('musterd_wake', p_batch.queue);
END $$;
COMMENT ON FUNCTION musterd.open_rest(musterd.batches) IS
    'Internal: lets the rows behind the canary run, of a batch whose row the caller has locked.';

CREATE FUNCTION musterd.report_canary(p_batch musterd.batches) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    v_seen   record;
    v_rate   numeric;
    v_rest   int;
    v_bytes  bigint;
    v_groups jsonb;
BEGIN
    SELECT COALESCE(sum(o.succeeded), 0)::int AS succeeded, COALESCE(sum(o.failed), 0)::int AS failed,
           GREATEST(EXTRACT(EPOCH FROM max(o.finished_at) - min(COALESCE(o.started_at, o.finished_at))), 0.001) AS seconds,
           COALESCE(sum(octet_length(o.outputs)), 0) AS bytes
      INTO v_seen FROM musterd.outcomes o WHERE o.batch_id = p_batch.id;
    SELECT v_seen.bytes + COALESCE(sum(octet_length(f.outputs::text)), 0) INTO v_bytes FROM musterd.failures f WHERE f.batch_id = p_batch.id;
    v_rest := p_batch.rows - v_seen.succeeded - v_seen.failed;
    v_rate := (v_seen.succeeded + v_seen.failed) / v_seen.seconds;
    SELECT COALESCE(jsonb_agg(jsonb_build_object('group', e.error_group, 'count', e.count) ORDER BY e.count DESC), '[]') INTO v_groups
      FROM musterd.count_errors(p_batch.id, 5) e;
    RETURN jsonb_build_object(
        'rows', v_seen.succeeded + v_seen.failed, 'succeeded', v_seen.succeeded, 'failed', v_seen.failed,
        'seconds', round(v_seen.seconds, 3), 'rows_per_second', round(v_rate, 1), 'rest', v_rest,
        'rest_seconds', CASE WHEN v_rate > 0 THEN round(v_rest / v_rate, 1) END, 'output_bytes', v_bytes,
        'rest_output_bytes', CASE WHEN v_seen.succeeded + v_seen.failed > 0
                                  THEN round(v_bytes * (v_rest::numeric / (v_seen.succeeded + v_seen.failed))) END,
        'errors', v_groups);
END $$;
COMMENT ON FUNCTION musterd.report_canary(musterd.batches) IS
    'Internal: how the canary of a batch ended, and what that says of the rest, if it runs as the canary did.';

CREATE FUNCTION musterd.finish_canary(p_id bigint) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_batch  musterd.batches;
    v_report jsonb;
    v_good   boolean;
BEGIN
    PERFORM 1 FROM musterd.batches b WHERE b.id = p_id FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 'busy';
    END IF;
    SELECT b.* INTO v_batch FROM musterd.canaries_over o JOIN musterd.batches b ON b.id = o.id WHERE o.id = p_id;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    v_report := musterd.report_canary(v_batch);
    v_good := v_batch.open AND COALESCE((v_report ->> 'failed')::int * 100.0 / v_batch.canary < v_batch.auto_release, false);
    UPDATE musterd.batches b SET canary_report = v_report, open = v_good WHERE b.id = p_id;
    IF v_good THEN
        PERFORM musterd.open_rest(v_batch);
    ELSE
        UPDATE musterd.task_records t SET state = 'held' WHERE t.id = p_id;
    END IF;
    PERFORM musterd.record_event(CASE WHEN v_good THEN 'canary_release' ELSE 'canary_hold' END, p_batch => p_id,
                                 p_detail => v_report - 'errors');
    RETURN 'canary';
END $$;
COMMENT ON FUNCTION musterd.finish_canary(bigint) IS
    'Internal: judges a canary that has ended, under the lock of its batch: the rest runs, or the batch is held with a report. busy: another '
    'transaction has it locked. Null: it has not ended, or was judged.';

CREATE FUNCTION musterd.check_budget(p_id bigint, OUT verdict text, OUT may_fail bigint, OUT has_failed bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_batch musterd.batches;
BEGIN
    IF EXISTS (SELECT FROM musterd.canaries_over b WHERE b.id = p_id) THEN
        verdict := musterd.finish_canary(p_id);
        IF verdict IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;
    FOR v_look IN 1..2 LOOP
        SELECT b.* INTO v_batch FROM musterd.batches b WHERE b.id = p_id;
        IF NOT FOUND OR NOT v_batch.open OR v_batch.on_budget IS NULL THEN
            verdict := CASE WHEN v_batch.open THEN 'within' ELSE 'closed' END;
            RETURN;
        END IF;
        may_fail := GREATEST(musterd.allowed_failures(v_batch.rows, v_batch.max_failed, v_batch.max_failed_percent), v_batch.forgiven);
        has_failed := musterd.failed_now(v_batch);
        IF has_failed <= may_fail
           -- With nothing left to stop it is over.
           OR (v_batch.next_line > v_batch.rows AND NOT EXISTS (SELECT FROM musterd.blocks k WHERE k.batch_id = p_id)) THEN
            verdict := 'within';
            RETURN;
        END IF;
        EXIT WHEN v_look = 2;
        -- It seems to be spent: lock the batch, without waiting for another transaction, and look again.
        PERFORM 1 FROM musterd.batches b WHERE b.id = p_id FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            verdict := 'busy';
            RETURN;
        END IF;
    END LOOP;
    IF v_batch.on_budget = 'abort' THEN
        PERFORM 1 FROM musterd.task_records t WHERE t.id = p_id FOR NO KEY UPDATE;
        PERFORM musterd.abort_batch(p_id);
        verdict := 'aborting';
    ELSE
        UPDATE musterd.batches b SET open = false WHERE b.id = p_id;
        UPDATE musterd.task_records t SET state = 'held' WHERE t.id = p_id;
        verdict := 'held';
    END IF;
    PERFORM musterd.record_event('budget_' || v_batch.on_budget, p_batch => p_id,
                                 p_detail => jsonb_build_object('failed', has_failed, 'allowed', may_fail));
END $$;
COMMENT ON FUNCTION musterd.check_budget(bigint) IS
    'Stops a batch with on_budget that has more failed rows than it may have; decided under its lock, of the generation and the '
    'rows it has then. A canary that has ended is judged here, too: canary. held, aborting: done now. within: it may go on. closed: it is not open any more. busy: another '
    'transaction has it locked, ask again.';

-- --------------------------------------------------------------------------------------------------- how it is audited

CREATE FUNCTION musterd.audit(p_batch bigint, OUT succeeded int, OUT failed int, OUT doubled bigint, OUT outside bigint,
                              OUT missing int4multirange, OUT recorded bigint)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_rows    int;
    v_covered bigint;
    v_inside  bigint;
BEGIN
    SELECT b.rows, COALESCE((SELECT sum(o.succeeded + o.failed) FROM musterd.outcomes o WHERE o.batch_id = p_batch), 0)
      INTO v_rows, recorded FROM musterd.batches b WHERE b.id = p_batch;
    -- By stripes of 10,000 lines: no set grows beyond one, so the cost is linear.
    WITH s AS MATERIALIZED (
        SELECT range_agg(r.lines) AS lines, sum(upper(r.lines) - lower(r.lines)) FILTER (WHERE r.succeeded) AS good,
               sum(upper(r.lines) - lower(r.lines)) FILTER (WHERE NOT r.succeeded) AS bad
          FROM musterd.recorded_lines r WHERE r.batch_id = p_batch GROUP BY r.stripe)
    SELECT COALESCE((SELECT sum(s.good) FROM s), 0), COALESCE((SELECT sum(s.bad) FROM s), 0),
           COALESCE(sum(upper(l.lines) - lower(l.lines)), 0),
           COALESCE(sum(upper(l.lines * int4range(1, v_rows + 1)) - lower(l.lines * int4range(1, v_rows + 1))), 0)
      INTO succeeded, failed, v_covered, v_inside FROM s, unnest(s.lines) l (lines);
    doubled := succeeded + failed - v_covered;
    outside := v_covered - v_inside;
    missing := '{}';
    IF v_inside < v_rows THEN
        SELECT range_agg(m.lines) INTO missing
          FROM generate_series(0, (v_rows - 1) / 10000) g
          LEFT JOIN (SELECT r.stripe, range_agg(r.lines) AS lines FROM musterd.recorded_lines r WHERE r.batch_id = p_batch GROUP BY r.stripe) s
                 ON s.stripe = g
         CROSS JOIN LATERAL unnest(int4multirange(int4range(g * 10000 + 1, LEAST((g + 1) * 10000, v_rows) + 1))
                                   - COALESCE(s.lines, '{}')) m (lines);
    END IF;
END $$;
COMMENT ON FUNCTION musterd.audit(bigint) IS
    'Recounts a batch line by line from its outcomes and failures: how many succeeded and failed, how many lines are recorded '
    'more than once or lie outside the batch (both always 0), and the set of lines of which nothing is recorded. recorded is the '
    'sum of all counts ever written, by which a later change is noticed.';

CREATE FUNCTION musterd.reopen_lines(p_batch musterd.batches, p_lines int4multirange, p_generation int) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    v_size  int := LEAST(COALESCE((SELECT q.block_size FROM musterd.queues q WHERE q.name = p_batch.queue), 500), 500);
    v_lines int;
BEGIN
    WITH cut AS (
        SELECT l.line, (row_number() OVER (ORDER BY l.line) - 1) / v_size AS block FROM musterd.lines_of(p_lines) l (line)),
    made AS (
        INSERT INTO musterd.blocks (batch_id, lines, rows, generation, queue, command, priority)
        SELECT p_batch.id, range_agg(int4range(c.line, c.line + 1)), count(*), p_generation, p_batch.queue, p_batch.command, p_batch.priority
          FROM cut c GROUP BY c.block ORDER BY c.block
        RETURNING rows)
    SELECT COALESCE(sum(m.rows), 0) INTO v_lines FROM made m;
    RETURN v_lines;
END $$;
COMMENT ON FUNCTION musterd.reopen_lines(musterd.batches, int4multirange, int) IS
    'Internal: makes free blocks of lines of a batch whose row the caller has locked, from their first attempt. Returns how many lines.';

CREATE FUNCTION musterd.heal_batch(p_id bigint) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_batch   musterd.batches;
    v_missing int4multirange;
    v_lines   int;
BEGIN
    PERFORM 1 FROM musterd.batches b WHERE b.id = p_id FOR NO KEY UPDATE SKIP LOCKED;
    SELECT b.* INTO v_batch FROM musterd.batches_over o JOIN musterd.batches b ON b.id = o.id
     WHERE FOUND AND o.id = p_id AND NOT o.aborting;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    -- No block has these lines, so no worker can write them any more, and under the lock nothing makes a block but this.
    SELECT a.missing INTO v_missing FROM musterd.audit(p_id) a;
    v_lines := musterd.reopen_lines(v_batch, v_missing, v_batch.generation);
    IF v_lines > 0 THEN
        PERFORM musterd.record_event('lines_reopened', p_batch => p_id, p_detail => jsonb_build_object('lines', v_lines));
        PERFORM pg_notify('musterd_wake', v_batch.queue);
    END IF;
    RETURN v_lines;
END $$;
COMMENT ON FUNCTION musterd.heal_batch(bigint) IS
    'For the periodic sweep: of a batch that has nothing left to run, lines of which nothing is recorded run again (a block was '
    'deleted by hand, say). Returns how many lines; 0 is the usual answer.';

-- ------------------------------------------------------------------------------------------------------- how it ends, once

CREATE FUNCTION musterd.finish_batch(p_batch musterd.batches, p_succeeded int, p_failed int, p_outputs jsonb) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_aborted int := p_batch.rows - p_succeeded - p_failed;
    v_allowed bigint := musterd.allowed_failures(p_batch.rows, p_batch.max_failed, p_batch.max_failed_percent);
    v_state   musterd.state;
    v_summary jsonb;
    v_task    musterd.task_records;
BEGIN
    v_state := CASE WHEN p_batch.aborting THEN 'aborted' WHEN p_failed > v_allowed THEN 'failed' ELSE 'succeeded' END;
    UPDATE musterd.batches b
       SET open = false, succeeded = p_succeeded, failed = p_failed, aborted = v_aborted,
           outputs = COALESCE(p_outputs, b.outputs), summarized_at = clock_timestamp()
     WHERE b.id = p_batch.id AND b.summarized_at IS NULL
       AND b.generation = p_batch.generation AND b.rows = p_batch.rows
       AND (b.aborting OR b.next_line > b.rows)
       AND NOT EXISTS (SELECT FROM musterd.blocks k WHERE k.batch_id = b.id);
    IF NOT FOUND THEN
        RETURN false;
    END IF;

    v_summary := jsonb_build_object(
        'rows', p_batch.rows, 'succeeded', p_succeeded, 'failed', p_failed, 'aborted', v_aborted,
        'generation', p_batch.generation, 'outputs', COALESCE(p_outputs, p_batch.outputs));
    UPDATE musterd.task_records t
       SET state = v_state, result = v_summary, finished_at = clock_timestamp(),
           error = CASE v_state
                       WHEN 'failed' THEN format('%s of %s rows failed, %s allowed', p_failed, p_batch.rows, v_allowed)
                       WHEN 'aborted' THEN format('aborted with %s of %s rows not run', v_aborted, p_batch.rows)
                   END
     WHERE t.id = p_batch.id
    RETURNING t.* INTO v_task;

    -- The outbox: this task exists if and only if the batch has ended. Its key makes a repeat harmless.
    IF p_batch.on_done IS NOT NULL THEN
        INSERT INTO musterd.task_records (command, payload, priority, request_hash, idempotency_key, traceparent, submitted_by)
        VALUES (p_batch.on_done,
                v_summary || jsonb_build_object('batch_id', p_batch.id, 'state', v_state, 'context', v_task.payload),
                -- By the hash, which producers cannot choose, check_task knows that the key is ours.
                p_batch.priority, 'on_done',
                format('batch/%s/%s/done', p_batch.id, p_batch.generation),
                v_task.traceparent, v_task.submitted_by)
        ON CONFLICT (command, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING;
    END IF;
    RETURN true;
END $$;
COMMENT ON FUNCTION musterd.finish_batch(musterd.batches, int, int, jsonb) IS
    'Internal: the writes that end a batch. False when the guard found that it is not over after all.';

CREATE FUNCTION musterd.complete_batch(p_id bigint, p_generation int, p_rows int, p_succeeded int, p_failed int,
                                       p_recorded bigint, p_outputs jsonb) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_batch musterd.batches;
BEGIN
    SELECT b.* INTO v_batch FROM musterd.batches b WHERE b.id = p_id;
    IF v_batch.summarized_at IS NOT NULL THEN
        RETURN 'ended';
    ELSIF NOT v_batch.open AND NOT v_batch.aborting THEN
        RETURN 'open';  -- held
    ELSIF v_batch.aborting THEN
        PERFORM musterd.drop_free_blocks(p_id);
    ELSIF v_batch.next_line <= v_batch.rows OR v_batch.canary_only THEN
        RETURN 'open';
    END IF;
    IF EXISTS (SELECT FROM musterd.blocks k WHERE k.batch_id = p_id) THEN
        RETURN 'open';
    END IF;

    -- It is over. Are the caller's counts those of this end? With the same generation and rows, the cursor exhausted and no
    -- block left, nothing can have come since an audit that covered every line.
    IF (v_batch.generation, v_batch.rows) IS DISTINCT FROM (p_generation, p_rows)
       OR p_succeeded IS NULL OR p_failed IS NULL
       OR p_succeeded + p_failed > v_batch.rows
       OR (NOT v_batch.aborting AND p_succeeded + p_failed <> v_batch.rows) THEN
        RETURN 'stale';
    END IF;
    -- When aborting, the counts prove nothing: a retry block that was free while the caller counted may have run since.
    IF v_batch.aborting
       AND (SELECT COALESCE(sum(o.succeeded + o.failed), 0) FROM musterd.outcomes o WHERE o.batch_id = p_id)
           IS DISTINCT FROM COALESCE(p_recorded, 0) THEN
        RETURN 'stale';
    END IF;
    -- A batch does not end without its files; one that is being aborted ends without them when its store refuses them.
    IF p_outputs IS NULL AND NOT v_batch.aborting
       AND EXISTS (SELECT FROM musterd.output_texts o WHERE o.batch_id = p_id) THEN
        RETURN 'stale';
    END IF;
    RETURN CASE WHEN musterd.finish_batch(v_batch, p_succeeded, p_failed, p_outputs) THEN 'completed' ELSE 'stale' END;
END $$;
COMMENT ON FUNCTION musterd.complete_batch(bigint, int, int, int, int, bigint, jsonb) IS
    'Internal: complete_scopes for one batch, after the locks; its uncles and listeners are the caller''s.';

CREATE TYPE musterd.scope_end AS (
    id         bigint,
    generation int,
    rows       int,
    succeeded  int,
    failed     int,
    recorded   bigint,
    outputs    jsonb
);
COMMENT ON TYPE musterd.scope_end IS
    'A scope that seems to be over; of a batch also the state it was audited in, what the audit counted, and its output files.';

CREATE FUNCTION musterd.complete_scopes(p_ends musterd.scope_end[], p_insist boolean DEFAULT false, p_wait boolean DEFAULT true)
RETURNS TABLE (scope_id bigint, answer text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_ids     bigint[] := ARRAY (SELECT e.id FROM unnest(p_ends) e ORDER BY e.id);
    v_batches bigint[];
    v_tasks   bigint[];
    v_end     musterd.scope_end;
    v_ended   bigint[] := '{}';
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'complete_scope(%) needs READ COMMITTED, this transaction is %',
            array_to_string(v_ids, ', '), current_setting('transaction_isolation')
            USING ERRCODE = 'invalid_transaction_state',
                  HINT = 'Start it with BEGIN ISOLATION LEVEL READ COMMITTED: an older snapshot cannot see the last row.';
    END IF;
    -- The advisory lock keeps workers from queueing behind each other. It is a courtesy: any session may hold it for ever,
    -- and the row locks that follow are what counts.
    IF NOT p_insist THEN
        v_ids := ARRAY (SELECT i FROM unnest(v_ids) i WHERE pg_try_advisory_xact_lock(hashtextextended('musterd.scope:' || i, 0)));
    END IF;
    -- A caller that must not wait passes by those that another transaction has locked: one holds up only itself.
    IF p_wait THEN
        PERFORM 1 FROM musterd.batches b WHERE b.id = ANY (v_ids) ORDER BY b.id FOR NO KEY UPDATE;
        PERFORM 1 FROM musterd.task_records t WHERE t.id = ANY (v_ids) ORDER BY t.id FOR NO KEY UPDATE;
    ELSE
        v_batches := ARRAY (SELECT b.id FROM musterd.batches b WHERE b.id = ANY (v_ids) ORDER BY b.id FOR NO KEY UPDATE SKIP LOCKED);
        v_tasks := ARRAY (SELECT t.id FROM musterd.task_records t WHERE t.id = ANY (v_ids) ORDER BY t.id FOR NO KEY UPDATE SKIP LOCKED);
        v_ids := ARRAY (SELECT i FROM unnest(v_ids) i
                         WHERE (i = ANY (v_tasks) OR NOT EXISTS (SELECT FROM musterd.task_records t WHERE t.id = i))
                           AND (i = ANY (v_batches) OR NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = i)));
    END IF;
    FOREACH v_end IN ARRAY p_ends LOOP
        scope_id := v_end.id;
        answer := CASE WHEN v_end.id <> ALL (v_ids) THEN 'locked'
                       WHEN NOT EXISTS (SELECT FROM musterd.task_records t WHERE t.id = v_end.id) THEN 'missing'
                       WHEN EXISTS (SELECT FROM musterd.batches b WHERE b.id = v_end.id)
                       THEN musterd.complete_batch(v_end.id, v_end.generation, v_end.rows, v_end.succeeded, v_end.failed,
                                                   v_end.recorded, v_end.outputs)
                       ELSE musterd.complete_parent(v_end.id) END;
        IF answer = 'completed' THEN
            v_ended := v_ended || v_end.id;
        END IF;
        RETURN NEXT;
    END LOOP;
    -- All at once: uncles are locked in the order of their ids.
    IF v_ended <> '{}' THEN
        PERFORM musterd.release_uncles(v_ended);
        PERFORM musterd.tell_ended(v_ended);
        PERFORM musterd.wake_structured(q.queue)
           FROM (SELECT DISTINCT t.queue FROM musterd.task_records t WHERE t.id = ANY (v_ended)) q;
    END IF;
END $$;
COMMENT ON FUNCTION musterd.complete_scopes(musterd.scope_end[], boolean, boolean) IS
    'The one transaction that ends batches and waiting parents. For each: completed; locked: another transaction is at it, try '
    'again; stale: generation, rows or counts are not those of this end, or its outputs are missing, look again; open: not over; '
    'ended: already; missing. The counts come from one snapshot in which the batch was over (batches_over) and audited; it stays '
    'over unless generation or rows change. p_insist does without the advisory lock; without p_wait a scope whose row is locked '
    'is answered at once. After completed, check the parent next.';

CREATE FUNCTION musterd.complete_scope(p_id bigint, p_generation int DEFAULT NULL, p_rows int DEFAULT NULL,
                                       p_succeeded int DEFAULT NULL, p_failed int DEFAULT NULL,
                                       p_outputs jsonb DEFAULT NULL, p_recorded bigint DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT c.answer FROM musterd.complete_scopes(ARRAY[
        ROW(p_id, p_generation, p_rows, p_succeeded, p_failed, p_recorded, p_outputs)::musterd.scope_end]) c);
END $$;
COMMENT ON FUNCTION musterd.complete_scope(bigint, int, int, int, int, jsonb, bigint) IS 'complete_scopes for one.';

CREATE FUNCTION musterd.complete_or_ask(p_id bigint, p_generation int DEFAULT NULL, p_rows int DEFAULT NULL,
                                        p_succeeded int DEFAULT NULL, p_failed int DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_answer text := 'locked';
BEGIN
    -- A producer's transaction may be SERIALIZABLE: that is no reason to refuse its submit.
    IF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
        v_answer := musterd.complete_scope(p_id, p_generation, p_rows, p_succeeded, p_failed);
    END IF;
    IF v_answer IN ('locked', 'stale') THEN
        PERFORM pg_notify('musterd_check', p_id::text);
    END IF;
    RETURN v_answer;
END $$;
COMMENT ON FUNCTION musterd.complete_or_ask(bigint, int, int, int, int) IS
    'Internal: complete_scope where it can be done at once, else NOTIFY musterd_check with the id, for a worker to do it.';

CREATE FUNCTION musterd.complete_parent_if_ready(p_parent_id bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN p_parent_id IS NOT NULL AND musterd.complete_or_ask(p_parent_id) = 'completed';
END $$;
COMMENT ON FUNCTION musterd.complete_parent_if_ready(bigint) IS
    'Ends a waiting parent whose children have all ended. True when this call did it.';

-- ---------------------------------------------------------------------------------------------------- how it is run again

CREATE FUNCTION musterd.failed_lines(p_batch bigint, p_error_groups text[], p_lines int4multirange, p_input jsonb) RETURNS int4multirange
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    v_groups int[] := ARRAY (SELECT musterd.error_group_of(g) FROM unnest(p_error_groups) g);
    v_lines  int4multirange;
BEGIN
    IF p_error_groups IS NULL AND p_lines IS NULL AND p_input IS NULL THEN
        RETURN NULL;
    END IF;
    SELECT COALESCE(range_agg(int4range(f.line, f.line + 1)), '{}') INTO v_lines FROM musterd.failures f
     WHERE f.batch_id = p_batch AND (p_error_groups IS NULL OR f.error_group = ANY (v_groups)) AND (p_lines IS NULL OR f.line <@ p_lines);
    IF p_input IS NOT NULL AND NOT isempty(v_lines) THEN
        SELECT COALESCE(range_agg(int4range(i.line, i.line + 1)), '{}') INTO v_lines
          FROM (SELECT c.first_line + t.n::int - 1 AS line, t.input
                  FROM musterd.chunks c CROSS JOIN LATERAL string_to_table(c.inputs, E'\n') WITH ORDINALITY t (input, n)
                 WHERE c.batch_id = p_batch AND v_lines && int4range(c.first_line, c.last_line + 1)) i
         -- An input is read only where its line was chosen.
         WHERE CASE WHEN i.line <@ v_lines THEN i.input::jsonb @> p_input ELSE false END;
    END IF;
    RETURN v_lines;
END $$;
COMMENT ON FUNCTION musterd.failed_lines(bigint, text[], int4multirange, jsonb) IS
    'Internal: the lines of a batch that failed with an error of one of these groups, are among these lines, and whose input contains this; '
    'what is null leaves nothing out. Null: all that failed.';

CREATE FUNCTION musterd.reopen_failed_lines(p_batch musterd.batches, p_lines int4multirange, OUT reopened int, OUT kept int)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_lines int4multirange;
BEGIN
    WITH moved AS (DELETE FROM musterd.failures f WHERE f.batch_id = p_batch.id AND (p_lines IS NULL OR f.line <@ p_lines) RETURNING f.*),
    kept AS (INSERT INTO musterd.failures_history (batch_id, line, generation, attempt, error_group, error, error_code, result, outputs,
                                                  finished_at, started_at, run_seconds, redriven_in)
             SELECT m.batch_id, m.line, m.generation, m.attempt, m.error_group, m.error, m.error_code, m.result, m.outputs,
                    m.finished_at, m.started_at, m.run_seconds, p_batch.generation + 1 FROM moved m RETURNING line)
    SELECT COALESCE(range_agg(int4range(k.line, k.line + 1)), '{}') INTO v_lines FROM kept k;
    reopened := musterd.reopen_lines(p_batch, v_lines, p_batch.generation + 1);
    kept := p_batch.failed - reopened;
    IF kept > 0 THEN
        -- Failures that stay count in the new generation, too. As old as the end before it: nothing was done for them now.
        INSERT INTO musterd.outcomes (batch_id, first_line, token, part, generation, attempt, lines, succeeded, failed, finished_at)
        VALUES (p_batch.id, 0, gen_random_uuid(), 1, p_batch.generation + 1, 1, '{}', 0, kept, p_batch.summarized_at);
    END IF;
END $$;
COMMENT ON FUNCTION musterd.reopen_failed_lines(musterd.batches, int4multirange) IS
    'Internal: moves the failures of a batch, whose row the caller has locked, to the history, and makes free blocks of their '
    'lines for the next generation: of these lines, or of all. Failures that stay are counted in the next generation.';

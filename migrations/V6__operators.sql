-- What operators call on tasks, batches and queues, and producers on what they submitted: hold, release, abort, redrive, retry, pause, resume,
-- hold_data, release_data.
--
-- Rule of this file: lock first, then decide; and a second call changes nothing. hold, release and abort take batches and
-- tasks alike and return the state the thing is in afterwards ('aborting' for one that is on its way to aborted). What changes
-- something writes an event in the same transaction.

-- ----------------------------------------------------------------------------------------------------------------- events

CREATE FUNCTION musterd.record_event(p_kind text, p_batch bigint DEFAULT NULL, p_task bigint DEFAULT NULL, p_worker text DEFAULT NULL,
                                     p_detail jsonb DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_client text := NULLIF(current_setting('musterd.client', true), '');
BEGIN
    -- Any session may say that it acts for a client; a worker's alone is believed.
    IF v_client IS NOT NULL AND pg_has_role(SESSION_USER, to_regrole('musterd_worker')::oid, 'MEMBER') IS NOT TRUE THEN
        v_client := NULL;
    END IF;
    INSERT INTO musterd.events (kind, actor, client, worker, batch, task, detail)
    VALUES (p_kind, SESSION_USER, left(v_client, 100), p_worker, p_batch, p_task, p_detail);
END $$;
COMMENT ON FUNCTION musterd.record_event(text, bigint, bigint, text, jsonb) IS
    'Internal: an event with the login of this session as its actor, and the setting musterd.client as its client if this is a worker''s session.';

CREATE FUNCTION musterd.record_steering(p_kind text, p_id bigint, p_detail jsonb DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM musterd.batches b WHERE b.id = p_id) THEN
        PERFORM musterd.record_event(p_kind, p_batch => p_id, p_detail => p_detail);
    ELSE
        PERFORM musterd.record_event(p_kind, p_task => p_id, p_detail => p_detail);
    END IF;
END $$;
COMMENT ON FUNCTION musterd.record_steering(text, bigint, jsonb) IS 'Internal: an event of a batch or of a task, whichever has this id.';

CREATE FUNCTION musterd.record_unbalanced(p_id bigint, p_missing int, p_doubled bigint, p_outside bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_detail jsonb := jsonb_build_object('missing', p_missing, 'doubled', p_doubled, 'outside', p_outside);
BEGIN
    -- It is looked at again and again: once for what was found.
    IF v_detail IS DISTINCT FROM (SELECT e.detail FROM musterd.events e WHERE e.batch = p_id AND e.kind = 'unbalanced' ORDER BY e.id DESC LIMIT 1) THEN
        PERFORM musterd.record_event('unbalanced', p_batch => p_id, p_detail => v_detail);
    END IF;
END $$;
COMMENT ON FUNCTION musterd.record_unbalanced(bigint, int, bigint, bigint) IS
    'For workers: the lines of a batch that seemed to be over do not add up. An event, unless its last one said the same.';

CREATE FUNCTION musterd.record_death() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM musterd.record_event('worker_dead', p_worker => NEW.id,
                                 p_detail => jsonb_build_object('silent_seconds', round(EXTRACT(EPOCH FROM clock_timestamp() - NEW.seen_at), 1)));
    RETURN NULL;
END $$;
COMMENT ON FUNCTION musterd.record_death() IS 'Trigger: an event for a worker that is declared dead.';
CREATE TRIGGER record_death AFTER UPDATE OF state ON musterd.workers
    FOR EACH ROW WHEN (NEW.state = 'dead' AND OLD.state <> 'dead') EXECUTE FUNCTION musterd.record_death();

-- ------------------------------------------------------------------------------------------------------- hold and release

CREATE FUNCTION musterd.check_isolation() RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'this needs READ COMMITTED, and the transaction is %', upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'active_sql_transaction',
                  HINT = 'Say BEGIN ISOLATION LEVEL READ COMMITTED: an older snapshot cannot see what was committed while it waited for a lock.';
    END IF;
END $$;
COMMENT ON FUNCTION musterd.check_isolation() IS
    'Internal: refuses isolation levels in which what is read after a lock was taken may be older than the lock.';

CREATE FUNCTION musterd.lock_ticket(p_task musterd.task_records) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- A claim that is under way has it locked: what it made of it is seen by the statement after.
    PERFORM 1 FROM musterd.task_tickets k
      WHERE k.queue = p_task.queue AND k.command = p_task.command AND k.tasks @> p_task.id AND k.number = p_task.ticket
      ORDER BY k.id FOR UPDATE;
    RETURN NOT EXISTS (SELECT FROM musterd.task_claims k WHERE k.tasks @> p_task.id AND k.number = p_task.ticket);
END $$;
COMMENT ON FUNCTION musterd.lock_ticket(musterd.task_records) IS
    'Internal: keeps a queued task, whose record the caller has locked, from being claimed until the transaction ends. False: a worker '
    'holds it.';

CREATE FUNCTION musterd.lock_task(p_id bigint) RETURNS musterd.task_records
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_task musterd.task_records;
BEGIN
    PERFORM musterd.check_isolation();
    PERFORM musterd.check_submitter(p_id);
    PERFORM 1 FROM musterd.batches b WHERE b.id = p_id FOR NO KEY UPDATE;
    PERFORM 1 FROM musterd.task_records t WHERE t.id = p_id FOR NO KEY UPDATE;
    SELECT t.* INTO v_task FROM musterd.task_records t WHERE t.id = p_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no task or batch %', p_id USING ERRCODE = 'no_data_found';
    END IF;
    RETURN v_task;
END $$;
COMMENT ON FUNCTION musterd.lock_task(bigint) IS 'Internal: locks a task that the caller may steer, and its batch first if it is one, and reads it then.';

CREATE FUNCTION musterd.hold(id bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_task  musterd.task_records := musterd.lock_task(hold.id);
    v_batch musterd.batches;
BEGIN
    SELECT b.* INTO v_batch FROM musterd.batches b WHERE b.id = hold.id;
    IF v_batch.aborting AND v_batch.summarized_at IS NULL THEN
        RETURN 'aborting';
    ELSIF v_batch.open THEN
        UPDATE musterd.batches b SET open = false WHERE b.id = hold.id;
    ELSIF v_batch.id IS NOT NULL OR v_task.state <> 'queued' THEN
        RETURN v_task.state;
    ELSIF NOT musterd.lock_ticket(v_task) THEN
        RETURN 'running';
    END IF;
    UPDATE musterd.task_records t SET state = 'held' WHERE t.id = hold.id;
    PERFORM musterd.record_steering('hold', hold.id);
    RETURN 'held';
END $$;
COMMENT ON FUNCTION musterd.hold(bigint) IS
    'Keeps a batch or a task from being claimed; what runs, runs on. A task that runs, waits for children or has ended is '
    'left as it is. Returns the state afterwards.';

CREATE FUNCTION musterd.release_batch(p_id bigint) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_batch musterd.batches;
BEGIN
    SELECT b.* INTO v_batch FROM musterd.batches b WHERE b.id = p_id;
    IF v_batch.canary_only AND v_batch.canary_report IS NOT NULL THEN
        PERFORM musterd.open_rest(v_batch);
    END IF;
    -- The failures so far are forgiven: a spent budget holds it again at the next one, not at the next look.
    UPDATE musterd.batches b
       SET open = true, forgiven = CASE WHEN b.on_budget IS NULL THEN b.forgiven ELSE musterd.failed_now(b)::int END
     WHERE b.id = p_id RETURNING b.* INTO v_batch;
    UPDATE musterd.task_records t SET state = 'running', run_at = now() WHERE t.id = p_id;
    PERFORM pg_notify('musterd_wake', v_batch.queue);
    IF v_batch.rows = 0 THEN
        IF musterd.complete_or_ask(p_id, v_batch.generation, 0, 0, 0) = 'completed' THEN
            PERFORM pg_notify('musterd_check', t.parent_id::text)
               FROM musterd.task_records t WHERE t.id = p_id AND t.parent_id IS NOT NULL;
        END IF;
    ELSIF v_batch.next_line > v_batch.rows
          AND NOT EXISTS (SELECT FROM musterd.blocks k WHERE k.batch_id = p_id) THEN
        -- Its last row ended while it was held: no flush will ask for its end.
        PERFORM pg_notify('musterd_check', p_id::text);
    END IF;
    RETURN (SELECT t.state FROM musterd.task_records t WHERE t.id = p_id);
END $$;
COMMENT ON FUNCTION musterd.release_batch(bigint) IS 'Internal: opens a held batch whose rows the caller has locked.';

CREATE FUNCTION musterd.release(id bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_task musterd.task_records := musterd.lock_task(release.id);
BEGIN
    IF EXISTS (SELECT FROM musterd.batches b WHERE b.id = release.id AND b.aborting AND b.summarized_at IS NULL) THEN
        RETURN 'aborting';
    ELSIF v_task.state <> 'held'
          -- A batch that is not open is held, whatever its record says: tables can be changed by hand.
          AND NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = release.id AND NOT b.open AND b.summarized_at IS NULL) THEN
        RETURN (SELECT t.state FROM musterd.tasks t WHERE t.id = release.id);
    END IF;
    PERFORM musterd.record_steering('release', release.id);
    IF EXISTS (SELECT FROM musterd.batches b WHERE b.id = release.id) THEN
        RETURN musterd.release_batch(release.id);
    END IF;
    UPDATE musterd.task_records t SET state = 'queued', run_at = GREATEST(t.run_at, now()), ticket = t.ticket + 1 WHERE t.id = release.id;
    PERFORM musterd.issue_tickets(ARRAY[release.id]);
    RETURN (SELECT t.state FROM musterd.tasks t WHERE t.id = release.id);
END $$;
COMMENT ON FUNCTION musterd.release(bigint) IS
    'Lets a held batch or task go. A batch that has nothing left to run ends. One whose canary has ended runs its other rows. Returns the '
    'state afterwards.';

-- ------------------------------------------------------------------------------------------------------------------ abort

CREATE FUNCTION musterd.abort_task(p_id bigint) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_task  musterd.task_records;
    v_ended bigint[];
BEGIN
    PERFORM musterd.check_isolation();
    -- Itself, its parent (which this end may end) and its child batches, in the one order.
    PERFORM 1 FROM musterd.batches b
      WHERE b.id IN (SELECT t.id FROM musterd.task_records t WHERE t.parent_id = p_id) ORDER BY b.id FOR NO KEY UPDATE;
    PERFORM 1 FROM musterd.task_records t
      WHERE t.id = p_id OR t.id = (SELECT c.parent_id FROM musterd.task_records c WHERE c.id = p_id)
      ORDER BY t.id FOR NO KEY UPDATE;
    SELECT t.* INTO v_task FROM musterd.task_records t WHERE t.id = p_id;
    IF musterd.is_final(v_task.state) THEN
        RETURN v_task.state;
    ELSIF NOT v_task.aborting THEN
        PERFORM musterd.record_event('abort', p_task => p_id);
    END IF;

    v_ended := musterd.abort_children(p_id);
    IF musterd.has_pending_children(p_id) THEN
        -- Child batches have blocks in hand. A parent ends after its children, so it waits for them.
        UPDATE musterd.task_records t SET aborting = true, state = 'waiting' WHERE t.id = p_id;
    ELSE
        UPDATE musterd.task_records t
           SET state = 'aborted', error = 'aborted on request', finished_at = clock_timestamp(),
               run_at = COALESCE(t.not_before, t.run_at), not_before = NULL
         WHERE t.id = p_id;
        v_ended := v_ended || p_id;
    END IF;
    -- The outcome of an attempt in progress is refused from now on; this tells its worker to stop trying.
    IF EXISTS (SELECT FROM musterd.task_claims k WHERE k.tasks @> p_id AND k.number = v_task.ticket) THEN
        PERFORM pg_notify('musterd_abort', p_id::text);
    END IF;
    PERFORM musterd.release_uncles(v_ended);
    PERFORM musterd.tell_ended(v_ended);
    IF p_id = ANY (v_ended) THEN
        PERFORM musterd.complete_parent_if_ready(v_task.parent_id);
        RETURN 'aborted';
    END IF;
    RETURN 'aborting';
END $$;
COMMENT ON FUNCTION musterd.abort_task(bigint) IS 'Internal: abort for a task that is no batch.';

CREATE FUNCTION musterd.abort(id bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_batch musterd.batches;
    v_task  musterd.task_records;
BEGIN
    -- Whether it is a batch never changes, so this look needs no lock.
    IF NOT EXISTS (SELECT FROM musterd.task_records t WHERE t.id = abort.id) THEN
        RAISE EXCEPTION 'no task or batch %', abort.id USING ERRCODE = 'no_data_found';
    ELSIF NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = abort.id) THEN
        PERFORM musterd.check_submitter(abort.id);
        RETURN musterd.abort_task(abort.id);
    END IF;
    v_task := musterd.lock_task(abort.id);
    SELECT b.* INTO v_batch FROM musterd.batches b WHERE b.id = abort.id;
    IF v_batch.summarized_at IS NOT NULL THEN
        RETURN v_task.state;
    END IF;
    IF NOT v_batch.aborting THEN
        PERFORM musterd.record_event('abort', p_batch => abort.id);
    END IF;
    PERFORM musterd.abort_batch(abort.id);
    RETURN 'aborting';
END $$;
COMMENT ON FUNCTION musterd.abort(bigint) IS
    'Stops a batch or a task for good, with its children. A batch closes at once and ends, as aborted, when no worker holds '
    'a block of it; rows without a result are then aborted. A task ends at once and whatever a worker still does for it is '
    'refused. Returns aborting, or the final state.';

-- ----------------------------------------------------------------------------------------------------------------- canary

CREATE FUNCTION musterd.canary(id bigint, rows text, sample boolean DEFAULT false, auto_release text DEFAULT NULL) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_task  musterd.task_records := musterd.lock_task(canary.id);
    v_limit real := musterd.canary_limit(canary.auto_release);
    v_batch musterd.batches;
    v_size  int;
    v_lines int4multirange;
BEGIN
    SELECT b.* INTO v_batch FROM musterd.batches b WHERE b.id = canary.id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no batch %', canary.id USING ERRCODE = 'no_data_found';
    END IF;
    v_size := musterd.canary_size(canary.rows, v_batch.rows);
    -- The repeat of a submission repeats this.
    IF v_batch.canary = v_size AND v_batch.auto_release IS NOT DISTINCT FROM v_limit THEN
        RETURN v_size;
    ELSIF v_batch.canary IS NOT NULL OR v_batch.next_line > 1 OR v_batch.generation > 1 OR v_batch.aborting OR v_batch.summarized_at IS NOT NULL
          AND v_batch.rows > 0 THEN
        RAISE EXCEPTION 'batch % has begun', canary.id
            USING ERRCODE = 'check_violation', HINT = 'A canary is chosen in the transaction that submits the batch, or while it is held and no row has run.';
    ELSIF v_size = v_batch.rows THEN
        -- Nothing would be held back.
        RETURN v_size;
    ELSIF canary.sample AND v_batch.rows > 50000000 THEN
        RAISE EXCEPTION 'batch % has % rows', canary.id, v_batch.rows
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A sample is taken of at most 50,000,000 rows; without sample the first rows are the canary.';
    END IF;
    IF canary.sample THEN
        -- One line out of each of as many equal parts.
        SELECT range_agg(int4range(p.first + p.skip, p.first + p.skip + 1)) INTO v_lines
          FROM (SELECT (i::bigint * v_batch.rows / v_size)::int + 1 AS first,
                       floor(random() * ((i + 1)::bigint * v_batch.rows / v_size - i::bigint * v_batch.rows / v_size))::int AS skip
                  FROM generate_series(0, v_size - 1) i) p;
    ELSE
        v_lines := int4multirange(int4range(1, v_size + 1));
    END IF;
    PERFORM musterd.reopen_lines(v_batch, v_lines, v_batch.generation);
    UPDATE musterd.batches b
       SET canary = v_size, canary_only = true, auto_release = v_limit, next_line = CASE WHEN canary.sample THEN 1 ELSE v_size + 1 END
     WHERE b.id = canary.id;
    PERFORM pg_notify('musterd_wake', v_batch.queue);
    RETURN v_size;
END $$;
COMMENT ON FUNCTION musterd.canary(bigint, text, boolean, text) IS
    'Has some rows of a batch run first, alone: a number (50) or a share (2%), the first ones or, with sample, spread over it. Then the batch is '
    'held with a report, until release; with auto_release (failed<0.5%) the rest runs by itself if that is true of the canary. For a batch of '
    'which no row has run: in the transaction of submit_batch, or while it is held. Returns how many rows the canary has; if that is all of them '
    'there is none.';

-- ---------------------------------------------------------------------------------------------------------------- redrive

CREATE FUNCTION musterd.redrive(id bigint, error_groups text[] DEFAULT NULL, lines int4multirange DEFAULT NULL, input jsonb DEFAULT NULL,
                                generation int DEFAULT NULL, context jsonb DEFAULT NULL, command text DEFAULT NULL,
                                OUT state text, OUT redriven int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_task  musterd.task_records;
    v_batch musterd.batches;
    v_lines int4multirange;
    v_kept  int;
BEGIN
    PERFORM musterd.check_submitter(redrive.id);
    IF redrive.command IS NOT NULL THEN
        PERFORM musterd.check_name('command', redrive.command);
    END IF;
    PERFORM 1 FROM musterd.batches b WHERE b.id = redrive.id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no batch %', redrive.id USING ERRCODE = 'no_data_found';
    END IF;
    -- The parent too, which is older: it must not end between our look and our commit.
    PERFORM 1 FROM musterd.task_records t
      WHERE t.id = (SELECT c.parent_id FROM musterd.task_records c WHERE c.id = redrive.id) FOR SHARE;
    v_task := musterd.lock_task(redrive.id);
    SELECT b.* INTO v_batch FROM musterd.batches b WHERE b.id = redrive.id;
    redriven := 0;
    IF redrive.generation <> v_batch.generation THEN
        RAISE EXCEPTION 'batch % is in generation % by now, and generation % was to be redriven', redrive.id, v_batch.generation, redrive.generation
            USING ERRCODE = 'check_violation', HINT = 'It was redriven since. Look at it, and ask for what failed in its current generation.';
    ELSIF v_batch.summarized_at IS NULL THEN
        state := CASE WHEN v_batch.aborting THEN 'aborting' ELSE v_task.state::text END;
        RETURN;
    ELSIF musterd.data_is_gone(redrive.id) THEN
        RETURN;  -- it has raised
    ELSIF v_batch.aborting THEN
        RAISE EXCEPTION 'batch % was aborted, which is for good', redrive.id
            USING ERRCODE = 'check_violation', HINT = 'Export its rows and submit them as a new batch.';
    END IF;
    v_lines := musterd.failed_lines(redrive.id, redrive.error_groups, redrive.lines, redrive.input);
    IF v_batch.failed = 0 OR isempty(v_lines) THEN
        state := v_task.state;
        RETURN;
    ELSIF EXISTS (SELECT FROM musterd.task_records p WHERE p.id = v_task.parent_id AND musterd.is_final(p.state)) THEN
        RAISE EXCEPTION 'batch % belongs to task %, which has ended', redrive.id, v_task.parent_id
            USING ERRCODE = 'check_violation', HINT = 'Export its failed rows and submit them as a new batch.';
    END IF;

    -- The record keeps the command that it was submitted with, by which its idempotency key is known.
    v_batch.command := COALESCE(redrive.command, v_batch.command);
    SELECT r.reopened, r.kept INTO redriven, v_kept FROM musterd.reopen_failed_lines(v_batch, v_lines) r;
    PERFORM musterd.record_event('redrive', p_batch => redrive.id, p_detail => jsonb_strip_nulls(jsonb_build_object(
        'rows', redriven, 'generation', v_batch.generation + 1, 'left', NULLIF(v_kept, 0), 'command', redrive.command)));
    UPDATE musterd.batches b
       SET generation = b.generation + 1, open = true, summarized_at = NULL, succeeded = NULL, failed = NULL, aborted = NULL,
           -- The failures that stay spend none of the budget.
           forgiven = CASE WHEN v_kept = 0 THEN 0
                           ELSE LEAST(v_kept + musterd.allowed_failures(b.rows, b.max_failed, b.max_failed_percent), 2000000000) END,
           command = v_batch.command, turn = nextval('musterd.turns')
     WHERE b.id = redrive.id;
    UPDATE musterd.task_records t
       SET state = 'running', result = NULL, error = NULL, finished_at = NULL, payload = COALESCE(redrive.context, t.payload)
     WHERE t.id = redrive.id;
    PERFORM pg_notify('musterd_wake', v_batch.queue);
    state := 'running';
END $$;
COMMENT ON FUNCTION musterd.redrive(bigint, text[], int4multirange, jsonb, int, jsonb, text) IS
    'Runs failed rows of an ended batch again, from their first attempt: a new generation of it, which ends with an '
    'on_done of its own. All of them, or those that failed with an error of one of these groups, are among these lines, and whose input '
    'contains this. generation: only if the batch is still in it, so that a repeat is refused. context, command: what the rows run with '
    'from now on. Rows that succeeded are left alone, and failures that were not asked for stay. Returns the state afterwards and how many rows run again; '
    'a batch that has not ended, or has no such rows, is left as it is. Refused for one that was aborted and for a child of a task '
    'that has ended.';

CREATE FUNCTION musterd.redrive_preview(id bigint, error_groups text[] DEFAULT NULL, lines int4multirange DEFAULT NULL, input jsonb DEFAULT NULL,
                                        OUT rows int, OUT first_lines int[], OUT groups jsonb)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_lines int4multirange := musterd.failed_lines(redrive_preview.id, redrive_preview.error_groups, redrive_preview.lines, redrive_preview.input);
BEGIN
    IF NOT musterd.may_see(redrive_preview.id) THEN
        RAISE EXCEPTION 'no batch %', redrive_preview.id USING ERRCODE = 'no_data_found';
    END IF;
    WITH g AS MATERIALIZED (
        SELECT f.error_group, count(*) AS number, min(f.line) AS first FROM musterd.failures f
         WHERE f.batch_id = redrive_preview.id AND (v_lines IS NULL OR f.line <@ v_lines) GROUP BY f.error_group)
    SELECT COALESCE(sum(g.number), 0), COALESCE((
               SELECT jsonb_agg(jsonb_build_object('group', musterd.error_group_name(t.error_group), 'count', t.number) ORDER BY t.number DESC, t.first)
                 FROM (SELECT * FROM g ORDER BY g.number DESC, g.first LIMIT 20) t), '[]')
      INTO rows, groups FROM g;
    first_lines := ARRAY (SELECT f.line FROM musterd.failures f
                           WHERE f.batch_id = redrive_preview.id AND (v_lines IS NULL OR f.line <@ v_lines) ORDER BY f.line LIMIT 10);
END $$;
COMMENT ON FUNCTION musterd.redrive_preview(bigint, text[], int4multirange, jsonb) IS
    'What redrive with these arguments would run again: how many rows, the first ten of their lines, and the twenty largest groups of their '
    'errors. Changes nothing.';

CREATE FUNCTION musterd.batch_redrives(p_batch bigint)
RETURNS TABLE (generation int, redriven int, fixed int, same int, otherwise int, left_over int)
LANGUAGE sql STABLE SECURITY DEFINER ROWS 2 SET search_path = pg_catalog, pg_temp SET jit = off AS $$
    WITH b AS MATERIALIZED (SELECT b.id, b.generation FROM musterd.batches b WHERE b.id = p_batch AND musterd.may_see(p_batch)),
    h AS MATERIALIZED (
        SELECT h.redriven_in AS generation, h.line, h.error_group, COALESCE(f.error_group, g.error_group) AS again
          FROM b
          JOIN musterd.failures_history h ON h.batch_id = b.id
          LEFT JOIN musterd.failures f ON f.batch_id = b.id AND f.line = h.line AND f.generation = h.redriven_in
          LEFT JOIN musterd.failures_history g ON g.batch_id = b.id AND g.line = h.line AND g.generation = h.redriven_in),
    -- Of the current generation it is known only by what was written in it.
    s AS MATERIALIZED (
        SELECT (o.first_line - 1) / 10000 AS stripe, range_agg(l.lines) AS lines
          FROM b JOIN musterd.outcomes o ON o.batch_id = b.id AND o.generation = b.generation AND o.first_line > 0
         CROSS JOIN LATERAL unnest(o.lines) l (lines) GROUP BY 1)
    SELECT h.generation, count(*)::int,
           (count(*) FILTER (WHERE h.again IS NULL AND (h.generation < b.generation OR h.line <@ s.lines)))::int,
           (count(*) FILTER (WHERE h.again = h.error_group))::int, (count(*) FILTER (WHERE h.again <> h.error_group))::int,
           (count(*) FILTER (WHERE h.again IS NULL AND h.generation = b.generation AND (h.line <@ s.lines) IS NOT TRUE))::int
      FROM b JOIN h ON true LEFT JOIN s ON s.stripe = (h.line - 1) / 10000
     GROUP BY h.generation ORDER BY h.generation
$$;
COMMENT ON FUNCTION musterd.batch_redrives(bigint) IS
    'What became of the rows that were run again, by generation: how many had failed before; are fixed; failed with an error of the same '
    'group, or of another one; and have no outcome, because the batch still runs or was aborted.';

-- ------------------------------------------------------------------------------------------------------- a task once more

CREATE FUNCTION musterd.retry_task(id bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_task  musterd.task_records;
    v_waits boolean;
BEGIN
    PERFORM musterd.check_submitter(retry_task.id);
    -- The parent first: it must not end between our look and our commit.
    PERFORM 1 FROM musterd.task_records t
      WHERE t.id = (SELECT c.parent_id FROM musterd.task_records c WHERE c.id = retry_task.id) FOR SHARE;
    v_task := musterd.lock_task(retry_task.id);
    IF v_task.state = 'queued' AND v_task.not_before IS NULL AND v_task.run_at > clock_timestamp() THEN
        IF NOT musterd.lock_ticket(v_task) THEN
            RETURN 'running';
        END IF;
        UPDATE musterd.task_records t SET run_at = now(), ticket = t.ticket + 1 WHERE t.id = retry_task.id;
    ELSIF v_task.state NOT IN ('failed', 'aborted') THEN
        RETURN (SELECT t.state FROM musterd.tasks t WHERE t.id = retry_task.id);
    ELSIF v_task.data_gone_at IS NOT NULL THEN
        RAISE EXCEPTION 'the payload of task % went on %', retry_task.id, v_task.data_gone_at::timestamptz(0)
            USING ERRCODE = 'MU410', HINT = 'Enqueue it again, with its payload.';
    ELSIF EXISTS (SELECT FROM musterd.batches b WHERE b.id = retry_task.id) THEN
        RAISE EXCEPTION 'task % is a batch', retry_task.id
            USING ERRCODE = 'check_violation', HINT = format('To run its failed rows again: musterd.redrive(%s).', retry_task.id);
    ELSIF EXISTS (SELECT FROM musterd.task_records p WHERE p.id = v_task.parent_id AND musterd.is_final(p.state)) THEN
        RAISE EXCEPTION 'task % belongs to task %, which has ended', retry_task.id, v_task.parent_id
            USING ERRCODE = 'check_violation', HINT = 'Enqueue it again.';
    ELSIF EXISTS (SELECT FROM musterd.task_records c WHERE c.parent_id = retry_task.id) THEN
        RAISE EXCEPTION 'task % has children, which have ended with it', retry_task.id
            USING ERRCODE = 'check_violation', HINT = 'Enqueue it again.';
    ELSE
        -- One that was never claimed would come back into its dedup window, and collide with a newer task there.
        -- An uncle that was aborted waits again for what has not ended.
        v_waits := EXISTS (SELECT FROM musterd.task_waits w WHERE w.task_id = retry_task.id);
        UPDATE musterd.task_records t
           SET state = 'queued', run_at = CASE WHEN v_waits THEN 'infinity' ELSE now() END, not_before = CASE WHEN v_waits THEN now() END,
               attempt = 1, crashes = 0, solo_crashes = 0, finished_at = NULL, aborting = false,
               claimed_at = COALESCE(t.claimed_at, clock_timestamp()), ticket = t.ticket + 1
         WHERE t.id = retry_task.id;
    END IF;
    PERFORM musterd.issue_tickets(ARRAY[retry_task.id]);
    PERFORM musterd.record_event('retry', p_task => retry_task.id);
    RETURN (SELECT t.state FROM musterd.tasks t WHERE t.id = retry_task.id);
END $$;
COMMENT ON FUNCTION musterd.retry_task(bigint) IS
    'By hand: runs a failed or aborted task again, from its first attempt, or a scheduled one at once. Returns the state '
    'afterwards; what runs, waits or succeeded is left as it is.';

-- --------------------------------------------------------------------------------------------------------- data that stays

CREATE FUNCTION musterd.keep_data(p_id bigint, p_held boolean) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM musterd.check_isolation();
    PERFORM musterd.check_submitter(p_id);
    PERFORM 1 FROM musterd.batches b WHERE b.id = p_id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no batch %', p_id USING ERRCODE = 'no_data_found';
    END IF;
    PERFORM musterd.data_is_gone(p_id);
    UPDATE musterd.batches b SET data_held = p_held WHERE b.id = p_id AND b.data_held <> p_held;
    IF FOUND THEN
        PERFORM musterd.record_event(CASE WHEN p_held THEN 'hold_data' ELSE 'release_data' END, p_batch => p_id);
    END IF;
END $$;
COMMENT ON FUNCTION musterd.keep_data(bigint, boolean) IS 'Internal: hold_data and release_data.';

CREATE FUNCTION musterd.hold_data(id bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM musterd.keep_data(hold_data.id, true);
    RETURN 'held';
END $$;
COMMENT ON FUNCTION musterd.hold_data(bigint) IS
    'Keeps the data and the record of a batch from retention until release_data, whatever its age. MU410 when the data is gone already.';

CREATE FUNCTION musterd.release_data(id bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM musterd.keep_data(release_data.id, false);
    RETURN 'released';
END $$;
COMMENT ON FUNCTION musterd.release_data(bigint) IS 'Ends a hold_data: the data goes when retention says so, at once if its time has come.';

-- ----------------------------------------------------------------------------------------------------------------- queues

CREATE FUNCTION musterd.pause_queue(name text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM musterd.check_name('name', pause_queue.name);
    INSERT INTO musterd.queues AS q (name, paused, paused_at) VALUES (pause_queue.name, true, now())
    ON CONFLICT (name) DO UPDATE SET paused = true, paused_at = now(), updated_at = now() WHERE NOT q.paused;
    IF FOUND THEN
        PERFORM musterd.record_event('pause', p_detail => jsonb_build_object('queue', pause_queue.name));
    END IF;
END $$;
COMMENT ON FUNCTION musterd.pause_queue(text) IS 'Nothing of this queue is claimed until resume_queue; what runs, runs on.';

CREATE FUNCTION musterd.resume_queue(name text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM musterd.check_name('name', resume_queue.name);
    UPDATE musterd.queues q SET paused = false, paused_at = NULL, updated_at = now()
     WHERE q.name = resume_queue.name AND q.paused;
    IF FOUND THEN
        PERFORM musterd.record_event('resume', p_detail => jsonb_build_object('queue', resume_queue.name));
    END IF;
    PERFORM pg_notify('musterd_wake', resume_queue.name);
END $$;
COMMENT ON FUNCTION musterd.resume_queue(text) IS 'Ends a pause; batches that were held stay held.';

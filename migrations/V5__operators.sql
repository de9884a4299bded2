-- What operators (and careful producers) call on tasks, batches and queues: hold, release, abort, pause, resume.
--
-- Rule of this file: lock first, then decide; and a second call changes nothing. hold, release and abort take batches and
-- tasks alike and return the state the thing is in afterwards ('aborting' for one that is on its way to aborted).

-- ------------------------------------------------------------------------------------------------------- hold and release

CREATE FUNCTION musterd.lock_task(p_id bigint) RETURNS musterd.tasks
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_task musterd.tasks;
BEGIN
    PERFORM 1 FROM musterd.batches b WHERE b.id = p_id FOR NO KEY UPDATE;
    PERFORM 1 FROM musterd.tasks t WHERE t.id = p_id FOR NO KEY UPDATE;
    SELECT t.* INTO v_task FROM musterd.tasks t WHERE t.id = p_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no task or batch %', p_id USING ERRCODE = 'no_data_found';
    END IF;
    RETURN v_task;
END $$;
COMMENT ON FUNCTION musterd.lock_task(bigint) IS 'Internal: locks a task, and its batch first if it is one, and reads it then.';

CREATE FUNCTION musterd.park_blocks(p_batch_id bigint, p_queue text, p_parked boolean) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_ids bigint[];
BEGIN
    v_ids := ARRAY (
        SELECT k.id FROM musterd.blocks k
         WHERE (k.batch_id = p_batch_id OR k.queue = p_queue) AND k.worker IS NULL
           AND (k.available_at = 'infinity') <> p_parked
         ORDER BY k.id FOR UPDATE);
    -- A batch that is held and a queue that is paused are two reasons to stay parked: both must be gone.
    UPDATE musterd.blocks k
       SET available_at = CASE WHEN p_parked THEN 'infinity' ELSE now() END
     WHERE k.id = ANY (v_ids) AND k.worker IS NULL
       AND (p_parked
            OR (EXISTS (SELECT FROM musterd.batches b WHERE b.id = k.batch_id AND b.open)
                AND NOT EXISTS (SELECT FROM musterd.queues q WHERE q.name = k.queue AND q.paused)));
END $$;
COMMENT ON FUNCTION musterd.park_blocks(bigint, text, boolean) IS
    'Internal: parks the free blocks of a batch or a queue at infinity, or makes them due now; for the latter the caller has '
    'locked the batches.';

CREATE FUNCTION musterd.hold(id bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_task  musterd.tasks := musterd.lock_task(hold.id);
    v_batch musterd.batches;
BEGIN
    SELECT b.* INTO v_batch FROM musterd.batches b WHERE b.id = hold.id;
    IF v_batch.aborting AND v_batch.summarized_at IS NULL THEN
        RETURN 'aborting';
    ELSIF v_batch.open THEN
        UPDATE musterd.batches b SET open = false WHERE b.id = hold.id;
        PERFORM musterd.park_blocks(hold.id, NULL, true);
    ELSIF v_batch.id IS NOT NULL OR v_task.state NOT IN ('queued', 'scheduled') THEN
        RETURN v_task.state;
    END IF;
    UPDATE musterd.tasks t SET state = 'held' WHERE t.id = hold.id;
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
    UPDATE musterd.batches b SET open = true WHERE b.id = p_id RETURNING b.* INTO v_batch;
    UPDATE musterd.tasks t SET state = 'running', run_at = now() WHERE t.id = p_id;
    PERFORM musterd.park_blocks(p_id, NULL, false);
    PERFORM pg_notify('musterd_wake', v_batch.queue);
    IF v_batch.rows = 0 THEN
        IF musterd.complete_or_ask(p_id, v_batch.generation, 0, 0, 0) = 'completed' THEN
            PERFORM pg_notify('musterd_check', t.parent_id::text)
               FROM musterd.tasks t WHERE t.id = p_id AND t.parent_id IS NOT NULL;
        END IF;
    ELSIF v_batch.next_line > v_batch.rows
          AND NOT EXISTS (SELECT FROM musterd.blocks k WHERE k.batch_id = p_id) THEN
        -- Its last row ended while it was held; nobody else will ask.
        PERFORM pg_notify('musterd_check', p_id::text);
    END IF;
    RETURN (SELECT t.state FROM musterd.tasks t WHERE t.id = p_id);
END $$;
COMMENT ON FUNCTION musterd.release_batch(bigint) IS 'Internal: opens a held batch whose rows the caller has locked.';

CREATE FUNCTION musterd.release(id bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_task musterd.tasks := musterd.lock_task(release.id);
BEGIN
    IF EXISTS (SELECT FROM musterd.batches b WHERE b.id = release.id AND b.aborting AND b.summarized_at IS NULL) THEN
        RETURN 'aborting';
    ELSIF v_task.state <> 'held' THEN
        RETURN v_task.state;
    ELSIF EXISTS (SELECT FROM musterd.batches b WHERE b.id = release.id) THEN
        RETURN musterd.release_batch(release.id);
    END IF;
    UPDATE musterd.tasks t
       SET state = CASE WHEN t.run_at > clock_timestamp() THEN 'scheduled' ELSE 'queued' END::musterd.state,
           run_at = GREATEST(t.run_at, now())
     WHERE t.id = release.id RETURNING t.* INTO v_task;
    PERFORM pg_notify('musterd_wake', v_task.queue);
    RETURN v_task.state;
END $$;
COMMENT ON FUNCTION musterd.release(bigint) IS
    'Lets a held batch or task go. A batch that has nothing left to run ends. Returns the state afterwards.';

-- ------------------------------------------------------------------------------------------------------------------ abort

CREATE FUNCTION musterd.abort_task(p_id bigint) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_task  musterd.tasks;
    v_ended bigint[];
BEGIN
    -- Itself, its parent (which this end may end) and its child batches, in the one order.
    PERFORM 1 FROM musterd.batches b
      WHERE b.id IN (SELECT t.id FROM musterd.tasks t WHERE t.parent_id = p_id) ORDER BY b.id FOR NO KEY UPDATE;
    PERFORM 1 FROM musterd.tasks t
      WHERE t.id = p_id OR t.id = (SELECT c.parent_id FROM musterd.tasks c WHERE c.id = p_id)
      ORDER BY t.id FOR NO KEY UPDATE;
    SELECT t.* INTO v_task FROM musterd.tasks t WHERE t.id = p_id;
    IF v_task.state IN ('succeeded', 'failed', 'aborted') THEN
        RETURN v_task.state;
    END IF;

    v_ended := musterd.abort_children(p_id);
    IF musterd.has_pending_children(p_id) THEN
        -- Child batches have blocks in hand. A parent ends after its children, so it waits for them.
        UPDATE musterd.tasks t SET aborting = true, state = 'waiting', worker = NULL, token = NULL WHERE t.id = p_id;
    ELSE
        UPDATE musterd.tasks t
           SET state = 'aborted', error = 'aborted on request', finished_at = clock_timestamp(), worker = NULL, token = NULL,
               run_at = COALESCE(t.not_before, t.run_at), not_before = NULL
         WHERE t.id = p_id;
        DELETE FROM musterd.task_waits w WHERE w.task_id = p_id;
        v_ended := v_ended || p_id;
    END IF;
    -- Without its token the outcome of the attempt in progress is refused; this tells its worker to stop trying.
    IF v_task.worker IS NOT NULL THEN
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
    v_task  musterd.tasks;
BEGIN
    -- Whether it is a batch never changes, so this look needs no lock.
    IF NOT EXISTS (SELECT FROM musterd.tasks t WHERE t.id = abort.id) THEN
        RAISE EXCEPTION 'no task or batch %', abort.id USING ERRCODE = 'no_data_found';
    ELSIF NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = abort.id) THEN
        RETURN musterd.abort_task(abort.id);
    END IF;
    v_task := musterd.lock_task(abort.id);
    SELECT b.* INTO v_batch FROM musterd.batches b WHERE b.id = abort.id;
    IF v_batch.summarized_at IS NOT NULL THEN
        RETURN v_task.state;
    END IF;
    PERFORM musterd.abort_batch(abort.id);
    RETURN 'aborting';
END $$;
COMMENT ON FUNCTION musterd.abort(bigint) IS
    'Stops a batch or a task for good, with its children. A batch closes at once and ends, as aborted, when no worker holds '
    'a block of it; rows without a result are then aborted. A task ends at once and whatever a worker still does for it is '
    'refused. Returns aborting, or the final state.';

-- ---------------------------------------------------------------------------------------------------------------- redrive

CREATE FUNCTION musterd.reopen_failed_lines(p_batch musterd.batches) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_size  int := COALESCE((SELECT q.block_size FROM musterd.queues q WHERE q.name = p_batch.queue), 500);
    v_lines int;
BEGIN
    INSERT INTO musterd.results_history (batch_id, line, generation, state, attempt, result, error, outputs, finished_at)
    SELECT r.batch_id, r.line, p_batch.generation, r.state, r.attempt, r.result, r.error, r.outputs, r.finished_at
      FROM musterd.results r WHERE r.batch_id = p_batch.id AND r.state = 'failed';
    DELETE FROM musterd.results r WHERE r.batch_id = p_batch.id AND r.state = 'failed';
    GET DIAGNOSTICS v_lines = ROW_COUNT;
    -- Progress is a sum of tallies, and so is what tells a stale count of an abort.
    INSERT INTO musterd.tallies (batch_id, token, failed) VALUES (p_batch.id, gen_random_uuid(), -v_lines);
    INSERT INTO musterd.blocks (batch_id, first_line, last_line, lines, queue, command, priority)
    SELECT p_batch.id, min(h.line), max(h.line),
           CASE WHEN max(h.line) - min(h.line) + 1 = count(*) THEN NULL ELSE array_agg(h.line ORDER BY h.line) END,
           p_batch.queue, p_batch.command, p_batch.priority
      FROM (SELECT h.line, (row_number() OVER (ORDER BY h.line) - 1) / v_size AS block FROM musterd.results_history h
             WHERE h.batch_id = p_batch.id AND h.generation = p_batch.generation) h
     GROUP BY h.block ORDER BY h.block;
    RETURN v_lines;
END $$;
COMMENT ON FUNCTION musterd.reopen_failed_lines(musterd.batches) IS
    'Internal: moves the failed results of a batch, whose row the caller has locked, to the history, and makes free blocks of '
    'their lines, with all their attempts before them. Returns how many.';

CREATE FUNCTION musterd.redrive(id bigint) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_task  musterd.tasks;
    v_batch musterd.batches;
BEGIN
    PERFORM 1 FROM musterd.batches b WHERE b.id = redrive.id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no batch %', redrive.id USING ERRCODE = 'no_data_found';
    END IF;
    -- The parent too, which is older: it must not end between our look and our commit.
    PERFORM 1 FROM musterd.tasks t
      WHERE t.id = (SELECT c.parent_id FROM musterd.tasks c WHERE c.id = redrive.id) FOR SHARE;
    v_task := musterd.lock_task(redrive.id);
    SELECT b.* INTO v_batch FROM musterd.batches b WHERE b.id = redrive.id;
    IF v_batch.summarized_at IS NULL THEN
        RETURN CASE WHEN v_batch.aborting THEN 'aborting' ELSE v_task.state::text END;
    ELSIF v_batch.aborting THEN
        RAISE EXCEPTION 'batch % was aborted, which is for good', redrive.id
            USING ERRCODE = 'check_violation', HINT = 'Export its rows and submit them as a new batch.';
    ELSIF v_batch.failed = 0 THEN
        RETURN v_task.state;
    ELSIF EXISTS (SELECT FROM musterd.tasks p WHERE p.id = v_task.parent_id AND p.state IN ('succeeded', 'failed', 'aborted')) THEN
        RAISE EXCEPTION 'batch % belongs to task %, which has ended', redrive.id, v_task.parent_id
            USING ERRCODE = 'check_violation', HINT = 'Export its failed rows and submit them as a new batch.';
    END IF;

    PERFORM musterd.reopen_failed_lines(v_batch);
    UPDATE musterd.batches b
       SET generation = b.generation + 1, open = true, summarized_at = NULL, succeeded = NULL, failed = NULL, aborted = NULL,
           turn = nextval('musterd.turns')
     WHERE b.id = redrive.id;
    UPDATE musterd.tasks t SET state = 'running', result = NULL, error = NULL, finished_at = NULL WHERE t.id = redrive.id;
    PERFORM pg_notify('musterd_wake', v_batch.queue);
    RETURN 'running';
END $$;
COMMENT ON FUNCTION musterd.redrive(bigint) IS
    'Runs the failed rows of an ended batch again, from their first attempt: a new generation of it, which ends anew, with its '
    'on_done. Rows that succeeded are left alone. Returns the state afterwards; a batch that has not ended, or has no failed '
    'rows, is left as it is. Refused for one that was aborted and for a child of a task that has ended.';

-- ----------------------------------------------------------------------------------------------------------------- queues

CREATE FUNCTION musterd.pause_queue(name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM musterd.check_name('name', pause_queue.name);
    INSERT INTO musterd.queues AS q (name, paused, paused_at) VALUES (pause_queue.name, true, now())
    ON CONFLICT (name) DO UPDATE SET paused = true, paused_at = now(), updated_at = now() WHERE NOT q.paused;
    PERFORM musterd.park_blocks(NULL, pause_queue.name, true);
END $$;
COMMENT ON FUNCTION musterd.pause_queue(text) IS 'Nothing of this queue is claimed until resume_queue; what runs, runs on.';

CREATE FUNCTION musterd.resume_queue(name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM musterd.check_name('name', resume_queue.name);
    UPDATE musterd.queues q SET paused = false, paused_at = NULL, updated_at = now()
     WHERE q.name = resume_queue.name AND q.paused;
    -- Lock the batches of parked blocks: one that is being held right now must not have its blocks brought back.
    PERFORM 1 FROM musterd.batches b
      WHERE b.id IN (SELECT k.batch_id FROM musterd.blocks k
                      WHERE k.queue = resume_queue.name AND k.worker IS NULL AND k.available_at = 'infinity')
      ORDER BY b.id FOR NO KEY UPDATE;
    PERFORM musterd.park_blocks(NULL, resume_queue.name, false);
    PERFORM pg_notify('musterd_wake', resume_queue.name);
END $$;
COMMENT ON FUNCTION musterd.resume_queue(text) IS 'Ends a pause; batches that were held stay held.';

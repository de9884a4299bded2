-- The life of a task in its order: what is refused, what an insert fills in, uncles, children, and the end of a parent.
--
-- Rule of this file: a lock is taken in a statement of its own and the decision is read in the next one. In READ COMMITTED
-- a statement that waited for a lock re-reads only the row it locked; everything else is as old as its snapshot. Each
-- statement of a VOLATILE plpgsql function has its own snapshot, which is what these functions are built on.

-- ------------------------------------------------------------------------------------------------------- what is refused
-- In words, before a constraint of a table does it: the server's own refusal quotes the whole row, payload and all.

-- No SET on this one: so the planner puts it in the place of its call, and asking costs nothing.
CREATE FUNCTION musterd.is_name(p_name text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT p_name COLLATE pg_catalog."C" OPERATOR(pg_catalog.~) '^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}$'
$$;
COMMENT ON FUNCTION musterd.is_name(text) IS
    'Internal: whether this can name a command or a queue. The rule is that of the configuration.';

CREATE FUNCTION musterd.check_name(p_what text, p_name text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF musterd.is_name(p_name) THEN
        RETURN;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
        MESSAGE = CASE WHEN p_name IS NULL THEN format('%s is null', p_what)
                      WHEN p_name = '' THEN format('%s is empty', p_what)
                      ELSE format('%s "%s" cannot be a name', p_what, left(p_name, 100)) END,
        HINT = 'A name is letters, digits and _-.: only, at most 100, and begins with none of -.:';
END $$;
COMMENT ON FUNCTION musterd.check_name(text, text) IS 'Internal: refuses what cannot name a command or a queue.';

CREATE FUNCTION musterd.check_key(p_what text, p_key text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_key = '' OR length(p_key) > 255 OR p_key ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = CASE WHEN p_key = '' THEN format('%s is empty', p_what)
                          WHEN length(p_key) > 255 THEN format('%s has %s characters', p_what, length(p_key))
                          ELSE format('%s has a control character in it', p_what) END,
            HINT = 'A key has 1 to 255 characters, none of them a control character; leave it out, or null, for none.';
    END IF;
END $$;
COMMENT ON FUNCTION musterd.check_key(text, text) IS 'Internal: refuses what cannot be a key; null is none.';

CREATE FUNCTION musterd.check_limits(p_of text, p_max_attempts int, p_timeout_name text, p_timeout interval) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_max_attempts < 1 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('max_attempts%s is %s', p_of, p_max_attempts),
            HINT = 'It is 1 or more; left out, the worker''s retry.max_attempts.';
    ELSIF p_timeout <= interval '0' OR p_timeout > interval '36600 days' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('%s%s is %s', p_timeout_name, p_of, p_timeout),
            HINT = 'It is above zero and at most a hundred years; left out, the handler''s timeout.';
    END IF;
END $$;
COMMENT ON FUNCTION musterd.check_limits(text, int, text, interval) IS 'Internal: refuses limits of attempts that cannot be.';

CREATE FUNCTION musterd.due_at(p_run_at timestamptz, p_delay interval DEFAULT NULL) RETURNS timestamptz
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_most interval := '36600 days';  -- a hundred years: what is later is a mistake, and calendars end
BEGIN
    IF p_run_at IS NOT NULL AND p_delay IS NOT NULL THEN
        RAISE EXCEPTION 'give run_at or delay, not both' USING ERRCODE = 'invalid_parameter_value';
    ELSIF p_delay > v_most OR p_run_at > now() + v_most THEN
        RAISE EXCEPTION '% is more than a hundred years ahead', CASE WHEN p_delay IS NULL THEN 'run_at' ELSE 'delay' END
            USING ERRCODE = 'invalid_parameter_value', HINT = 'To keep a task until you say so, hold it: musterd.hold(id).';
    END IF;
    RETURN GREATEST(p_run_at, now() + GREATEST(p_delay, interval '0'), now());
END $$;
COMMENT ON FUNCTION musterd.due_at(timestamptz, interval) IS
    'Internal: when a task is due; what lies in the past is now, what is a hundred years ahead is refused.';

CREATE FUNCTION musterd.check_task(p_task musterd.tasks) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    -- A handler's reply may spawn many: say that it is one of them.
    v_of text := COALESCE(' of a child of task ' || p_task.parent_id, '');
BEGIN
    -- A call costs more than a task: only for what is there to be judged.
    IF (musterd.is_name(p_task.command) AND musterd.is_name(p_task.queue)) IS NOT TRUE THEN
        PERFORM musterd.check_name('command' || v_of, p_task.command);
        PERFORM musterd.check_name('queue' || v_of, p_task.queue);
    END IF;
    IF p_task.dedup_key IS NOT NULL THEN
        PERFORM musterd.check_key('dedup_key' || v_of, p_task.dedup_key);
    END IF;
    IF p_task.idempotency_key IS NOT NULL THEN
        PERFORM musterd.check_key('idempotency_key' || v_of, p_task.idempotency_key);
    END IF;
    IF p_task.child_key IS NOT NULL THEN
        PERFORM musterd.check_key('child_key' || v_of, p_task.child_key);
    END IF;
    IF p_task.max_attempts IS NOT NULL OR p_task.timeout IS NOT NULL THEN
        PERFORM musterd.check_limits(v_of, p_task.max_attempts, 'timeout', p_task.timeout);
    END IF;
    IF p_task.on_child_failure NOT IN ('wait', 'abort_siblings') THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('on_child_failure%s is "%s"', v_of, left(p_task.on_child_failure, 100)),
            HINT = 'It is wait or abort_siblings.';
    ELSIF p_task.child_key IS NOT NULL AND p_task.parent_id IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'a child_key needs a parent',
            HINT = 'Without one, use enqueue with a dedup_key or an idempotency_key.';
    END IF;
END $$;
COMMENT ON FUNCTION musterd.check_task(musterd.tasks) IS 'Internal: refuses what cannot be a task, however it is inserted.';

-- --------------------------------------------------------------------------------------------------- a task is inserted

CREATE FUNCTION musterd.runs_under(p_id bigint) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_self bigint := NULLIF(current_setting('musterd.task_id', true), '')::bigint;
BEGIN
    RETURN v_self IS NOT NULL AND EXISTS (
        SELECT FROM musterd.tasks t
         WHERE t.id = v_self AND t.state = 'running' AND p_id IN (t.id, t.parent_id)
           AND t.token::text = current_setting('musterd.task_token', true));
END $$;
COMMENT ON FUNCTION musterd.runs_under(bigint) IS
    'Internal: whether this transaction is an attempt of the task, or of a child of it. A worker sets musterd.task_id and '
    'musterd.task_token for it, and commits it only while the token is still the task''s: until then neither can end. So '
    'nothing needs to be locked for as long as a procedure runs, and an abort need not wait for it.';

CREATE FUNCTION musterd.enforce_no_grandchildren() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_parent musterd.tasks;
BEGIN
    IF TG_OP = 'UPDATE' THEN
        RAISE EXCEPTION 'task % cannot change its parent', OLD.id USING ERRCODE = 'check_violation';
    END IF;
    IF musterd.runs_under(NEW.parent_id) THEN
        SELECT t.* INTO v_parent FROM musterd.tasks t WHERE t.id = NEW.parent_id;
    ELSE
        -- The lock keeps the parent from ending until the child is committed; the answer is on the locked row itself.
        SELECT t.* INTO v_parent FROM musterd.tasks t WHERE t.id = NEW.parent_id FOR SHARE;
    END IF;
    IF v_parent.id IS NULL THEN
        RAISE EXCEPTION 'no task % to be the parent of a % task', NEW.parent_id, NEW.command USING ERRCODE = 'no_data_found';
    ELSIF v_parent.parent_id IS NOT NULL THEN
        RAISE EXCEPTION 'task % is a child itself and cannot have children', NEW.parent_id
            USING ERRCODE = 'check_violation',
                  HINT = format('To spawn a sibling, pass its parent: %s.', v_parent.parent_id);
    ELSIF musterd.is_final(v_parent.state) OR v_parent.aborting THEN
        RAISE EXCEPTION 'task % has ended or is being aborted and takes no more children', NEW.parent_id
            USING ERRCODE = 'check_violation';
    ELSIF EXISTS (SELECT FROM musterd.batches b WHERE b.id = NEW.parent_id) THEN
        RAISE EXCEPTION 'task % is a batch; its children are its rows', NEW.parent_id
            USING ERRCODE = 'check_violation', HINT = 'Add rows with musterd.append_rows.';
    END IF;
    NEW.queue := COALESCE(NEW.queue, v_parent.queue);
    NEW.priority := COALESCE(NEW.priority, v_parent.priority);
    RETURN NEW;
END $$;
COMMENT ON FUNCTION musterd.enforce_no_grandchildren() IS
    'Trigger: a child joins only a living, top-level task that is no batch, and keeps it alive until its own commit.';

CREATE FUNCTION musterd.fill_in_task() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.queue IS NULL THEN
        SELECT c.queue INTO NEW.queue FROM musterd.commands c WHERE c.name = NEW.command;
        NEW.queue := COALESCE(NEW.queue, 'default');
    END IF;
    NEW.priority := COALESCE(NEW.priority, 100);
    NEW.payload := COALESCE(NEW.payload, '{}');
    NEW.on_child_failure := COALESCE(NEW.on_child_failure, 'wait');
    -- The plain task, of which there are millions, is judged without a call.
    IF (musterd.is_name(NEW.command) AND musterd.is_name(NEW.queue) AND NEW.on_child_failure = 'wait'
        AND (NEW.dedup_key, NEW.idempotency_key, NEW.child_key, NEW.max_attempts, NEW.timeout) IS NULL) IS NOT TRUE THEN
        PERFORM musterd.check_task(NEW);
    END IF;
    IF NEW.not_before IS NULL AND NEW.run_at = now() THEN
        NULL;  -- at once, as most are
    ELSIF NEW.not_before IS NULL THEN
        NEW.run_at := musterd.due_at(NEW.run_at);
    ELSE  -- an uncle waits for others, not for a time
        NEW.not_before := musterd.due_at(NEW.not_before);
        NEW.run_at := 'infinity';
    END IF;
    IF NEW.state IS NULL THEN
        NEW.state := CASE WHEN NEW.run_at > clock_timestamp() THEN 'scheduled' ELSE 'queued' END;
    END IF;
    RETURN NEW;
END $$;
COMMENT ON FUNCTION musterd.fill_in_task() IS
    'Trigger: INSERT INTO musterd.tasks (command, payload) is all a producer needs; what cannot be a task is refused in words.';

CREATE FUNCTION musterd.wake_queues() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- Scheduled tasks too: a dispatcher that sleeps until the next due time has to look again. Not uncles, whose time is open.
    PERFORM pg_notify('musterd_wake', q.queue)
       FROM (SELECT DISTINCT f.queue FROM fresh f
              WHERE f.state = 'queued' OR (f.state = 'scheduled' AND f.not_before IS NULL)) q;
    RETURN NULL;
END $$;
COMMENT ON FUNCTION musterd.wake_queues() IS 'Trigger: one NOTIFY musterd_wake per statement and queue.';

-- Triggers of a kind fire in the order of their names: enforce_… goes before fill_in_…, the parent's queue before the
-- command's.
CREATE TRIGGER enforce_no_grandchildren BEFORE INSERT ON musterd.tasks
    FOR EACH ROW WHEN (NEW.parent_id IS NOT NULL) EXECUTE FUNCTION musterd.enforce_no_grandchildren();
CREATE TRIGGER enforce_same_parent BEFORE UPDATE OF parent_id ON musterd.tasks
    FOR EACH ROW WHEN (NEW.parent_id IS DISTINCT FROM OLD.parent_id) EXECUTE FUNCTION musterd.enforce_no_grandchildren();
CREATE TRIGGER fill_in_task BEFORE INSERT ON musterd.tasks
    FOR EACH ROW EXECUTE FUNCTION musterd.fill_in_task();
CREATE TRIGGER wake_queues AFTER INSERT ON musterd.tasks
    REFERENCING NEW TABLE AS fresh FOR EACH STATEMENT EXECUTE FUNCTION musterd.wake_queues();

-- ----------------------------------------------------------------------------------------------------------------- uncles

CREATE FUNCTION musterd.start_ready_uncles(p_uncles bigint[]) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_now    timestamptz := clock_timestamp();
    v_queues text[];
BEGIN
    WITH started AS (
        UPDATE musterd.tasks t
           SET run_at = GREATEST(t.not_before, v_now),
               not_before = NULL,
               state = CASE WHEN t.state = 'scheduled' AND t.not_before <= v_now THEN 'queued' ELSE t.state END
         WHERE t.id = ANY (p_uncles)
           AND t.not_before IS NOT NULL
           AND t.state IN ('scheduled', 'held')
           AND NOT EXISTS (SELECT FROM musterd.task_waits w WHERE w.task_id = t.id)
        RETURNING t.queue)
    SELECT COALESCE(array_agg(s.queue), '{}') INTO v_queues FROM started s;
    PERFORM pg_notify('musterd_wake', q.queue) FROM (SELECT DISTINCT unnest(v_queues)) q (queue);
    RETURN cardinality(v_queues);
END $$;
COMMENT ON FUNCTION musterd.start_ready_uncles(bigint[]) IS
    'Internal: makes due those of the given, locked uncles that wait for nothing any more. Returns how many.';

CREATE FUNCTION musterd.release_uncles(p_ended bigint[]) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_uncles bigint[];
BEGIN
    -- Lock all of them first: of two tasks that end at once, the second then sees what the first has deleted.
    PERFORM 1 FROM musterd.tasks t
      WHERE t.id = ANY (ARRAY (SELECT w.task_id FROM musterd.task_waits w WHERE w.after_id = ANY (p_ended)))
      ORDER BY t.id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    WITH gone AS (DELETE FROM musterd.task_waits w WHERE w.after_id = ANY (p_ended) RETURNING w.task_id)
    SELECT array_agg(DISTINCT g.task_id) INTO v_uncles FROM gone g;
    RETURN musterd.start_ready_uncles(v_uncles);
END $$;
COMMENT ON FUNCTION musterd.release_uncles(bigint[]) IS
    'Call it in the transaction that ends these tasks, after their state was written. Starts the uncles whose last '
    'dependency this was; returns how many.';

CREATE FUNCTION musterd.sweep_uncles() RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_ended    bigint[];
    v_orphans  bigint[];
    v_released int;
BEGIN
    SELECT array_agg(DISTINCT w.after_id) INTO v_ended
      FROM musterd.task_waits w JOIN musterd.tasks t ON t.id = w.after_id
     WHERE musterd.is_final(t.state);
    v_released := musterd.release_uncles(v_ended);
    -- One order for all locks on uncles. A wait added after this look is seen by start_ready_uncles, in a newer snapshot.
    v_orphans := ARRAY (
        SELECT t.id FROM musterd.tasks t
         WHERE t.state = 'scheduled' AND t.not_before IS NOT NULL
           AND NOT EXISTS (SELECT FROM musterd.task_waits w WHERE w.task_id = t.id)
         ORDER BY t.id FOR NO KEY UPDATE);
    RETURN v_released + musterd.start_ready_uncles(v_orphans);
END $$;
COMMENT ON FUNCTION musterd.sweep_uncles() IS
    'For the periodic sweep: starts every uncle without an open dependency. 0 is the usual answer.';

-- ------------------------------------------------------------------------------------------------------- notifications

CREATE FUNCTION musterd.tell_ended(p_ids bigint[]) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT pg_notify('musterd_done', jsonb_build_object('id', t.id, 'state', t.state)::text)
      FROM musterd.tasks t WHERE t.id = ANY (p_ids) ORDER BY t.id;
$$;
COMMENT ON FUNCTION musterd.tell_ended(bigint[]) IS 'Internal: NOTIFY musterd_done, {"id", "state"}, for tasks that have just ended.';

CREATE FUNCTION musterd.wake_structured(p_queue text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT pg_notify('musterd_wake', q.name) FROM musterd.queues q WHERE q.name = p_queue AND q.mode = 'structured';
$$;
COMMENT ON FUNCTION musterd.wake_structured(text) IS
    'Internal: a scope has ended; in a structured queue the fibers of all replicas were waiting for that.';

-- ------------------------------------------------------------------------------------------------------ asked by handlers

CREATE FUNCTION musterd.has_pending_children(p_task_id bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM musterd.tasks t
         WHERE t.parent_id = p_task_id AND musterd.is_unfinished(t.state));
END $$;
COMMENT ON FUNCTION musterd.has_pending_children(bigint) IS 'Whether the task has children that have not ended.';

CREATE FUNCTION musterd.has_failed_siblings(p_task_id bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM musterd.tasks me JOIN musterd.tasks t ON t.parent_id = me.parent_id
         WHERE me.id = p_task_id AND t.id <> me.id AND t.state IN ('failed', 'aborted'));
END $$;
COMMENT ON FUNCTION musterd.has_failed_siblings(bigint) IS 'Whether a sibling of the task has failed or was aborted.';

-- ------------------------------------------------------------------------------------------------------ the end of a parent

CREATE FUNCTION musterd.abort_children(p_parent_id bigint) RETURNS bigint[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_batch   bigint;
    v_running bigint[];
    v_ended   bigint[];
BEGIN
    -- Batches come before tasks in the lock order, and the parent is locked already: take those that are free to take,
    -- never wait. A batch that another transaction has locked runs on; the next check of the parent tries it again.
    FOR v_batch IN
        SELECT b.id FROM musterd.batches b
         WHERE b.id IN (SELECT t.id FROM musterd.tasks t
                         WHERE t.parent_id = p_parent_id
                           AND musterd.is_unfinished(t.state))
           AND NOT b.aborting
         ORDER BY b.id FOR NO KEY UPDATE SKIP LOCKED
    LOOP
        PERFORM 1 FROM musterd.tasks t WHERE t.id = v_batch FOR NO KEY UPDATE;
        PERFORM musterd.abort_batch(v_batch);
    END LOOP;

    PERFORM 1 FROM musterd.tasks t
      WHERE t.parent_id = p_parent_id AND musterd.is_unfinished(t.state)
        AND NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = t.id)
      ORDER BY t.id FOR NO KEY UPDATE;
    v_running := ARRAY (
        SELECT t.id FROM musterd.tasks t WHERE t.parent_id = p_parent_id AND t.state = 'running' AND t.worker IS NOT NULL);
    WITH ended AS (
        UPDATE musterd.tasks t
           SET state = 'aborted', error = 'aborted with its parent or siblings', finished_at = clock_timestamp(),
               worker = NULL, token = NULL
         WHERE t.parent_id = p_parent_id AND musterd.is_unfinished(t.state)
           AND NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = t.id)
        RETURNING t.id)
    SELECT COALESCE(array_agg(e.id ORDER BY e.id), '{}') INTO v_ended FROM ended e;
    PERFORM pg_notify('musterd_abort', r.id::text) FROM unnest(v_running) r (id);
    RETURN v_ended;
END $$;
COMMENT ON FUNCTION musterd.abort_children(bigint) IS
    'Internal: aborts the open children of a task the caller has locked. Returns the plain tasks it ended; child batches '
    'end later, when their blocks are given back.';

CREATE FUNCTION musterd.finish_parent(p_task musterd.tasks) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_children int;
    v_failed   int;
BEGIN
    SELECT count(*), count(*) FILTER (WHERE t.state <> 'succeeded') INTO v_children, v_failed
      FROM musterd.tasks t WHERE t.parent_id = p_task.id;
    UPDATE musterd.tasks t
       SET state = CASE WHEN t.aborting THEN 'aborted'
                        WHEN t.error IS NOT NULL OR v_failed > 0 THEN 'failed'
                        ELSE 'succeeded' END::musterd.state,
           error = CASE WHEN t.aborting THEN 'aborted on request'
                        ELSE COALESCE(t.error, CASE WHEN v_failed > 0
                                                    THEN format('%s of %s children failed', v_failed, v_children) END) END,
           finished_at = clock_timestamp()
     WHERE t.id = p_task.id AND t.state = 'waiting';
END $$;
COMMENT ON FUNCTION musterd.finish_parent(musterd.tasks) IS
    'Internal: the writes that end a waiting parent whose children have all ended. An aborted child counts as '
    'a failed one.';

CREATE FUNCTION musterd.complete_parent(p_id bigint) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_task  musterd.tasks;
    v_ended bigint[];
BEGIN
    SELECT t.* INTO v_task FROM musterd.tasks t WHERE t.id = p_id;
    IF musterd.is_final(v_task.state) THEN
        RETURN 'ended';
    ELSIF v_task.state <> 'waiting' THEN
        RETURN 'open';
    END IF;
    IF v_task.aborting
       OR (v_task.on_child_failure = 'abort_siblings'
           AND EXISTS (SELECT FROM musterd.tasks t WHERE t.parent_id = p_id AND t.state IN ('failed', 'aborted'))) THEN
        v_ended := musterd.abort_children(p_id);
        PERFORM musterd.release_uncles(v_ended);
        PERFORM musterd.tell_ended(v_ended);
    END IF;
    IF musterd.has_pending_children(p_id) THEN
        RETURN 'open';
    END IF;
    PERFORM musterd.finish_parent(v_task);
    RETURN 'completed';
END $$;
COMMENT ON FUNCTION musterd.complete_parent(bigint) IS
    'Internal: complete_scopes for a task without rows, after the locks; its uncles and listeners are the caller''s.';

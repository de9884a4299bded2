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
    IF p_max_attempts NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('max_attempts%s is %s', p_of, p_max_attempts),
            HINT = 'It is 1 to 1000; left out, the worker''s retry.max_attempts.';
    -- The timers of PostgreSQL end at 24.8 days.
    ELSIF p_timeout <= interval '0' OR p_timeout > interval '24 days' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('%s%s is %s', p_timeout_name, p_of, p_timeout),
            HINT = 'It is above zero and at most 24 days; left out, the handler''s timeout.';
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

CREATE FUNCTION musterd.check_task(p_task musterd.task_records) RETURNS void
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
        IF p_task.idempotency_key ~ '^batch/[0-9]+/[0-9]+/done$' AND p_task.request_hash IS DISTINCT FROM 'on_done' THEN
            RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('idempotency_key%s is "%s", which belongs to the end of a batch', v_of, p_task.idempotency_key),
                HINT = 'Choose a key that does not look like batch/ID/GENERATION/done.';
        END IF;
    END IF;
    IF p_task.child_key IS NOT NULL THEN
        PERFORM musterd.check_key('child_key' || v_of, p_task.child_key);
    END IF;
    IF p_task.max_attempts IS NOT NULL OR p_task.timeout IS NOT NULL THEN
        PERFORM musterd.check_limits(v_of, p_task.max_attempts, 'timeout', p_task.timeout);
    END IF;
    IF p_task.priority NOT BETWEEN -1000000 AND 1000000 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('priority%s is %s', v_of, p_task.priority),
            HINT = 'It is -1000000 to 1000000; smaller runs sooner, and left out it is 100.';
    ELSIF p_task.on_child_failure NOT IN ('wait', 'abort_siblings') THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('on_child_failure%s is "%s"', v_of, left(p_task.on_child_failure, 100)),
            HINT = 'It is wait or abort_siblings.';
    ELSIF p_task.child_key IS NOT NULL AND p_task.parent_id IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'a child_key needs a parent',
            HINT = 'Without one, use enqueue with a dedup_key or an idempotency_key.';
    END IF;
END $$;
COMMENT ON FUNCTION musterd.check_task(musterd.task_records) IS 'Internal: refuses what cannot be a task, however it is inserted.';

-- --------------------------------------------------------------------------------------------------- a task is inserted

CREATE FUNCTION musterd.runs_under(p_id bigint) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_self bigint := NULLIF(current_setting('musterd.task_id', true), '')::bigint;
BEGIN
    RETURN v_self IS NOT NULL AND EXISTS (
        SELECT FROM musterd.task_records t
          JOIN musterd.task_claims k ON k.number = t.ticket AND k.tasks @> t.id
         WHERE t.id = v_self AND t.state = 'queued' AND p_id IN (t.id, t.parent_id)
           AND k.token::text = current_setting('musterd.task_token', true));
END $$;
COMMENT ON FUNCTION musterd.runs_under(bigint) IS
    'Internal: whether this transaction is an attempt of the task, or of a child of it. A worker sets musterd.task_id and '
    'musterd.task_token for it, and commits it only while the token is still the task''s: until then neither can end. So '
    'nothing needs to be locked for as long as a procedure runs, and an abort need not wait for it.';

CREATE FUNCTION musterd.check_submitter(p_id bigint) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_task record;
BEGIN
    -- Who submitted it never changes, so this look needs no lock; and a lock is not given to those who are refused.
    SELECT t.submitted_by, COALESCE(t.parent_id, t.id) AS scope INTO v_task FROM musterd.task_records t WHERE t.id = p_id;
    IF NOT FOUND OR v_task.submitted_by = musterd.caller() OR musterd.steers_all() OR musterd.runs_under(v_task.scope) THEN
        RETURN;
    END IF;
    RAISE EXCEPTION 'task or batch % was not submitted by %', p_id, musterd.caller()
        USING ERRCODE = 'insufficient_privilege', HINT = 'For what others submitted: GRANT musterd_operator TO this user.';
END $$;
COMMENT ON FUNCTION musterd.check_submitter(bigint) IS
    'Internal: refuses (42501) a caller that neither submitted this task or batch nor may steer all, unless it is the task''s own attempt. '
    'One that does not exist is the next statement''s matter.';

CREATE FUNCTION musterd.enforce_no_grandchildren() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_parent musterd.task_records;
BEGIN
    IF TG_OP = 'UPDATE' THEN
        RAISE EXCEPTION 'a task cannot change its parent' USING ERRCODE = 'check_violation';
    END IF;
    IF musterd.runs_under(NEW.parent_id) THEN
        SELECT t.* INTO v_parent FROM musterd.task_records t WHERE t.id = NEW.parent_id;
    ELSE
        -- The lock keeps the parent from ending until the child is committed; the answer is on the locked row itself.
        SELECT t.* INTO v_parent FROM musterd.task_records t WHERE t.id = NEW.parent_id FOR SHARE;
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
    NEW.submitted_by := v_parent.submitted_by;
    RETURN NEW;
END $$;
COMMENT ON FUNCTION musterd.enforce_no_grandchildren() IS
    'Trigger: a child joins only a living, top-level task that is no batch, and keeps it alive until its own commit; and it keeps its parent.';

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
        AND NEW.priority BETWEEN -1000000 AND 1000000
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
    NEW.state := COALESCE(NEW.state, 'queued');
    RETURN NEW;
END $$;
COMMENT ON FUNCTION musterd.fill_in_task() IS
    'Trigger: INSERT INTO musterd.tasks (command, payload) is all a producer needs; what cannot be a task is refused in words.';

CREATE FUNCTION musterd.issue_tickets(p_ids bigint[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_queue  text;
    v_queues text[];
BEGIN
    IF cardinality(p_ids) = 1 THEN  -- as most are, and without the grouping half as dear
        INSERT INTO musterd.task_tickets (queue, command, priority, parent_id, tasks, count, number, crashes, keyed, bytes, due_at, ready)
        SELECT t.queue, t.command, t.priority, t.parent_id, int8multirange(int8range(t.id, t.id + 1)), 1, t.ticket, t.crashes,
               t.dedup_key IS NOT NULL AND t.claimed_at IS NULL, pg_column_size(t.payload), t.run_at, t.run_at <= clock_timestamp()
          FROM musterd.task_records t WHERE t.id = p_ids[1] AND t.state = 'queued' AND t.run_at < 'infinity'
        RETURNING queue INTO v_queue;
        IF FOUND THEN
            PERFORM pg_notify('musterd_wake', v_queue);
        END IF;
        RETURN;
    END IF;
    WITH issued AS (
        INSERT INTO musterd.task_tickets (queue, command, priority, parent_id, tasks, count, number, crashes, keyed, bytes, due_at, ready)
        SELECT f.queue, f.command, f.priority, f.parent_id,
               CASE WHEN count(*) = max(f.id) - min(f.id) + 1 THEN int8multirange(int8range(min(f.id), max(f.id) + 1))
                    ELSE musterd.id_set(array_agg(f.id)) END,
               count(*), f.ticket, f.crashes, f.keyed,
               sum(f.bytes), f.run_at, f.run_at <= clock_timestamp()
          FROM (SELECT t.id, t.queue, t.command, t.priority, t.parent_id, t.ticket, t.crashes, t.run_at, k.keyed,
                       pg_column_size(t.payload) AS bytes,
                       (row_number() OVER (PARTITION BY t.queue, t.command, t.priority, t.parent_id, t.ticket, t.crashes, t.run_at, k.keyed
                                               ORDER BY t.id) - 1) / 500 AS place
                  FROM musterd.task_records t
                 CROSS JOIN LATERAL (SELECT t.dedup_key IS NOT NULL AND t.claimed_at IS NULL AS keyed) k
                 WHERE t.id = ANY (p_ids) AND t.state = 'queued' AND t.run_at < 'infinity') f
         GROUP BY f.queue, f.command, f.priority, f.parent_id, f.ticket, f.crashes, f.run_at, f.keyed, f.place
         ORDER BY min(f.id)
        RETURNING queue)
    SELECT array_agg(DISTINCT i.queue) INTO v_queues FROM issued i;
    -- What is for later, too: a dispatcher that sleeps until the next due time has to look again.
    PERFORM pg_notify('musterd_wake', q.name) FROM unnest(v_queues) q (name);
END $$;
COMMENT ON FUNCTION musterd.issue_tickets(bigint[]) IS
    'Internal: tickets for those of these tasks that are queued and whose time is known, with the numbers they have now; the caller has '
    'raised them. Tasks that are alike share a ticket. One NOTIFY musterd_wake per queue.';

CREATE FUNCTION musterd.issue_first_tickets() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    -- Not batches, whose rows are claimed, nor uncles, whose time is open.
    v_ids bigint[] := ARRAY (SELECT f.id FROM fresh f WHERE f.state = 'queued' AND f.run_at < 'infinity');
BEGIN
    IF v_ids <> '{}' THEN
        PERFORM musterd.issue_tickets(v_ids);
    END IF;
    RETURN NULL;
END $$;
COMMENT ON FUNCTION musterd.issue_first_tickets() IS 'Trigger: tickets for what a statement has inserted, and one NOTIFY musterd_wake per queue.';

CREATE FUNCTION musterd.reissue_ticket() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- One that a worker holds runs on.
    IF NOT EXISTS (SELECT FROM musterd.task_claims k WHERE k.tasks @> NEW.id AND k.number = NEW.ticket) THEN
        UPDATE musterd.task_records t SET ticket = t.ticket + 1 WHERE t.id = NEW.id;
        PERFORM musterd.issue_tickets(ARRAY[NEW.id]);
    END IF;
    RETURN NULL;
END $$;
COMMENT ON FUNCTION musterd.reissue_ticket() IS
    'Trigger: an UPDATE by hand of what a ticket is made of (queue, command, priority, run_at) makes another one.';

-- Triggers of a kind fire in the order of their names: enforce_… goes before fill_in_…, the parent's queue before the
-- command's.
CREATE TRIGGER enforce_no_grandchildren BEFORE INSERT ON musterd.task_records
    FOR EACH ROW WHEN (NEW.parent_id IS NOT NULL) EXECUTE FUNCTION musterd.enforce_no_grandchildren();
-- Not for each row: with a trigger of that kind the server locks every row of every UPDATE first, whatever columns it writes, and the
-- end of a task writes an eighth more WAL.
CREATE TRIGGER enforce_same_parent BEFORE UPDATE OF parent_id ON musterd.task_records
    FOR EACH STATEMENT EXECUTE FUNCTION musterd.enforce_no_grandchildren();
CREATE TRIGGER fill_in_task BEFORE INSERT ON musterd.task_records
    FOR EACH ROW EXECUTE FUNCTION musterd.fill_in_task();
CREATE TRIGGER reissue_ticket AFTER UPDATE OF queue, command, priority, run_at ON musterd.task_records
    FOR EACH ROW WHEN (NEW.state = 'queued' AND NEW.ticket = OLD.ticket
                       AND (NEW.queue, NEW.command, NEW.priority, NEW.run_at) IS DISTINCT FROM (OLD.queue, OLD.command, OLD.priority, OLD.run_at))
    EXECUTE FUNCTION musterd.reissue_ticket();
CREATE TRIGGER issue_first_tickets AFTER INSERT ON musterd.task_records
    REFERENCING NEW TABLE AS fresh FOR EACH STATEMENT EXECUTE FUNCTION musterd.issue_first_tickets();

-- ----------------------------------------------------------------------------------------------------------------- uncles
-- The end of a task takes away the waits for it and waits for no lock: an uncle may be locked by a producer for as long as that
-- likes. Those that could not be started in the same transaction are looked at after its commit, by a check of the uncle.

CREATE FUNCTION musterd.start_ready_uncles(p_uncles bigint[]) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_now     timestamptz := clock_timestamp();
    v_started bigint[];
BEGIN
    WITH started AS (
        UPDATE musterd.task_records t
           SET run_at = GREATEST(t.not_before, v_now), not_before = NULL, ticket = t.ticket + 1
         WHERE t.id = ANY (p_uncles)
           AND t.not_before IS NOT NULL
           AND t.state IN ('queued', 'held')
           -- A wait for a task that has ended is one that nothing took away.
           AND NOT EXISTS (SELECT FROM musterd.task_waits w JOIN musterd.task_records a ON a.id = w.after_id
                            WHERE w.task_id = t.id AND NOT musterd.is_final(a.state))
        RETURNING t.id)
    SELECT COALESCE(array_agg(s.id), '{}') INTO v_started FROM started s;
    PERFORM musterd.issue_tickets(v_started);
    RETURN cardinality(v_started);
END $$;
COMMENT ON FUNCTION musterd.start_ready_uncles(bigint[]) IS
    'Internal: makes due those of the given, locked uncles that wait for nothing any more. Returns how many.';

CREATE FUNCTION musterd.release_uncles(p_ended bigint[]) RETURNS bigint[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_uncles bigint[] := ARRAY (SELECT DISTINCT w.task_id FROM musterd.task_waits w WHERE w.after_id = ANY (p_ended));
    v_locked bigint[];
BEGIN
    IF v_uncles = '{}' THEN
        RETURN v_uncles;
    END IF;
    -- Locked before the waits go: of two tasks that end at once, the second then sees what the first has deleted, or does not get
    -- the lock and has the uncle looked at after its commit.
    v_locked := ARRAY (SELECT t.id FROM musterd.task_records t WHERE t.id = ANY (v_uncles) ORDER BY t.id FOR NO KEY UPDATE SKIP LOCKED);
    DELETE FROM musterd.task_waits w WHERE w.after_id = ANY (p_ended);
    PERFORM musterd.start_ready_uncles(v_locked);
    v_uncles := ARRAY (SELECT t.id FROM musterd.task_records t WHERE t.id = ANY (v_uncles) AND t.not_before IS NOT NULL);
    PERFORM pg_notify('musterd_check', u::text) FROM unnest(v_uncles) u;
    RETURN v_uncles;
END $$;
COMMENT ON FUNCTION musterd.release_uncles(bigint[]) IS
    'Call it in the transaction that ends these tasks, after their state was written. Starts the uncles whose last dependency this '
    'was. Returns those that still wait: after the commit have them checked (complete_scope), for their last dependency may be ending '
    'in another transaction, and a lock on them is not waited for.';

CREATE FUNCTION musterd.sweep_uncles() RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_ready bigint[];
BEGIN
    DELETE FROM musterd.task_waits w USING musterd.task_records t WHERE t.id = w.after_id AND musterd.is_final(t.state);
    -- A wait added after this look is seen by start_ready_uncles, in a newer snapshot.
    v_ready := ARRAY (
        SELECT t.id FROM musterd.task_records t
         WHERE t.state IN ('queued', 'held') AND t.not_before IS NOT NULL
           AND NOT EXISTS (SELECT FROM musterd.task_waits w WHERE w.task_id = t.id)
         ORDER BY t.id FOR NO KEY UPDATE SKIP LOCKED);
    RETURN musterd.start_ready_uncles(v_ready);
END $$;
COMMENT ON FUNCTION musterd.sweep_uncles() IS
    'For the periodic sweep: starts every uncle without an open dependency. 0 is the usual answer.';

CREATE FUNCTION musterd.sweep_tickets() RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_lost bigint[];
BEGIN
    -- Locked by nothing and looked at again below: most of what this finds was claimed or issued a moment ago.
    WITH known AS MATERIALIZED (
        SELECT i.id, k.number FROM musterd.task_tickets k CROSS JOIN LATERAL musterd.task_ids(k.tasks) i (id)
        UNION ALL
        SELECT i.id, k.number FROM musterd.task_claims k CROSS JOIN LATERAL musterd.task_ids(k.tasks) i (id))
    SELECT array_agg(t.id) INTO v_lost FROM musterd.task_records t
     WHERE musterd.is_open(t.state) AND t.run_at < 'infinity' AND t.created_at < now() - interval '1 minute'
       AND NOT EXISTS (SELECT FROM known k WHERE k.id = t.id AND k.number = t.ticket);
    IF v_lost IS NULL THEN
        RETURN 0;
    END IF;
    v_lost := ARRAY (SELECT t.id FROM musterd.task_records t WHERE t.id = ANY (v_lost) AND t.state = 'queued' ORDER BY t.id
                        FOR NO KEY UPDATE SKIP LOCKED);
    v_lost := ARRAY (
        SELECT t.id FROM musterd.task_records t
         WHERE t.id = ANY (v_lost)
           AND NOT EXISTS (SELECT FROM musterd.task_tickets k WHERE k.tasks @> t.id AND k.number = t.ticket)
           AND NOT EXISTS (SELECT FROM musterd.task_claims k WHERE k.tasks @> t.id AND k.number = t.ticket));
    UPDATE musterd.task_records t SET ticket = t.ticket + 1 WHERE t.id = ANY (v_lost);
    PERFORM musterd.issue_tickets(v_lost);
    IF v_lost <> '{}' THEN
        PERFORM musterd.record_event('tickets_reissued', p_detail => jsonb_build_object('tasks', cardinality(v_lost)));
    END IF;
    RETURN cardinality(v_lost);
END $$;
COMMENT ON FUNCTION musterd.sweep_tickets() IS
    'For the periodic sweep: a ticket for every queued task that has none and that no worker holds, for whatever reason. 0 is the usual '
    'answer.';

-- ------------------------------------------------------------------------------------------------------- notifications

-- In plpgsql, for its plan is kept: made again for each call it would cost more than all the rest.
CREATE FUNCTION musterd.tell_states(p_ids bigint[], p_states musterd.state[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    -- One for each state, not one for each task: a NOTIFY a task costs a quarter of the speed. Of many that lie scattered, several:
    -- a payload has an end.
    PERFORM pg_notify('musterd_done', CASE WHEN g.first = g.last THEN jsonb_build_object('id', g.first, 'state', g.state)
                                           ELSE jsonb_build_object('ids', g.ranges, 'state', g.state) END::text)
      FROM (SELECT r.state, r.place, min(r.first) AS first, max(r.last) AS last,
                   jsonb_agg(jsonb_build_array(r.first, r.last) ORDER BY r.first) AS ranges
              FROM (SELECT u.state, min(u.id) AS first, max(u.id) AS last,
                           (row_number() OVER (PARTITION BY u.state ORDER BY min(u.id)) - 1) / 150 AS place
                      FROM (SELECT t.state, t.id, t.id - row_number() OVER (PARTITION BY t.state ORDER BY t.id) AS run
                              FROM unnest(p_ids, p_states) t (id, state)) u
                     GROUP BY u.state, u.run) r
             GROUP BY r.state, r.place) g
     ORDER BY g.first;
END $$;
COMMENT ON FUNCTION musterd.tell_states(bigint[], musterd.state[]) IS
    'Internal: NOTIFY musterd_done for tasks that have just ended in these states: {"id", "state"} for one, {"ids": [[first, last], ...], '
    '"state"} for many.';

CREATE FUNCTION musterd.tell_ended(p_ids bigint[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    PERFORM musterd.tell_states(array_agg(t.id), array_agg(t.state)) FROM musterd.task_records t WHERE t.id = ANY (p_ids);
END $$;
COMMENT ON FUNCTION musterd.tell_ended(bigint[]) IS 'Internal: tell_states for tasks that have just ended, in the states they have now.';

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
        SELECT FROM musterd.task_records t
         WHERE t.parent_id = p_task_id AND musterd.is_unfinished(t.state));
END $$;
COMMENT ON FUNCTION musterd.has_pending_children(bigint) IS 'Whether the task has children that have not ended.';

CREATE FUNCTION musterd.has_failed_siblings(p_task_id bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM musterd.task_records me JOIN musterd.task_records t ON t.parent_id = me.parent_id
         WHERE me.id = p_task_id AND t.id <> me.id AND t.state IN ('failed', 'aborted'));
END $$;
COMMENT ON FUNCTION musterd.has_failed_siblings(bigint) IS 'Whether a sibling of the task has failed or was aborted.';

CREATE FUNCTION musterd.set_result(p_result jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_task text := NULLIF(current_setting('musterd.task_id', true), '');
BEGIN
    IF octet_length(p_result::text) > 1048576 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('the result of task %s has %s bytes', v_task, octet_length(p_result::text)),
            HINT = 'A result has at most 1 MiB. Store it in a table of your own, and where it is as the result.';
    END IF;
    IF v_task IS NOT NULL AND musterd.runs_under(v_task::bigint) THEN
        UPDATE musterd.task_claims k
           SET results = CASE WHEN p_result IS NULL THEN k.results - v_task
                              ELSE COALESCE(k.results, '{}') || jsonb_build_object(v_task, p_result) END
         WHERE k.token::text = current_setting('musterd.task_token', true);
        RETURN;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
        MESSAGE = 'set_result is called outside of a task''s procedure',
        HINT = 'Call it in the procedure that a worker, or process_tasks, calls for the task.';
END $$;
COMMENT ON FUNCTION musterd.set_result(jsonb) IS
    'In the procedure of a task: the result that the task has when this attempt commits. The last call counts; null takes it back.';

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
         WHERE b.id IN (SELECT t.id FROM musterd.task_records t
                         WHERE t.parent_id = p_parent_id
                           AND musterd.is_unfinished(t.state))
           AND NOT b.aborting
         ORDER BY b.id FOR NO KEY UPDATE SKIP LOCKED
    LOOP
        PERFORM 1 FROM musterd.task_records t WHERE t.id = v_batch FOR NO KEY UPDATE;
        PERFORM musterd.abort_batch(v_batch);
    END LOOP;

    PERFORM 1 FROM musterd.task_records t
      WHERE t.parent_id = p_parent_id AND musterd.is_unfinished(t.state)
        AND NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = t.id)
      ORDER BY t.id FOR NO KEY UPDATE;
    v_running := ARRAY (SELECT t.id FROM musterd.tasks t WHERE t.parent_id = p_parent_id AND musterd.is_unfinished(t.state) AND t.worker IS NOT NULL);
    WITH ended AS (
        UPDATE musterd.task_records t
           SET state = 'aborted', error = 'aborted with its parent or siblings', finished_at = clock_timestamp()
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

CREATE FUNCTION musterd.finish_parent(p_task musterd.task_records) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_children int;
    v_failed   int;
BEGIN
    SELECT count(*), count(*) FILTER (WHERE t.state <> 'succeeded') INTO v_children, v_failed
      FROM musterd.task_records t WHERE t.parent_id = p_task.id;
    UPDATE musterd.task_records t
       SET state = CASE WHEN t.aborting THEN 'aborted'
                        WHEN t.error IS NOT NULL OR v_failed > 0 THEN 'failed'
                        ELSE 'succeeded' END::musterd.state,
           error = CASE WHEN t.aborting THEN 'aborted on request'
                        ELSE COALESCE(t.error, CASE WHEN v_failed > 0
                                                    THEN format('%s of %s children failed', v_failed, v_children) END) END,
           finished_at = clock_timestamp()
     WHERE t.id = p_task.id AND t.state = 'waiting';
END $$;
COMMENT ON FUNCTION musterd.finish_parent(musterd.task_records) IS
    'Internal: the writes that end a waiting parent whose children have all ended. An aborted child counts as '
    'a failed one.';

CREATE FUNCTION musterd.complete_parent(p_id bigint) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_task  musterd.task_records;
    v_ended bigint[];
BEGIN
    SELECT t.* INTO v_task FROM musterd.task_records t WHERE t.id = p_id;
    IF musterd.is_final(v_task.state) THEN
        RETURN 'ended';
    ELSIF v_task.state <> 'waiting' THEN
        IF v_task.not_before IS NOT NULL THEN
            PERFORM musterd.start_ready_uncles(ARRAY[p_id]);
        END IF;
        RETURN 'open';
    END IF;
    IF v_task.aborting
       OR (v_task.on_child_failure = 'abort_siblings'
           AND EXISTS (SELECT FROM musterd.task_records t WHERE t.parent_id = p_id AND t.state IN ('failed', 'aborted'))) THEN
        v_ended := musterd.abort_children(p_id);
        PERFORM musterd.release_uncles(v_ended);
        PERFORM musterd.tell_ended(v_ended);
        -- One that another transaction has locked was passed by: it is tried again.
        IF EXISTS (SELECT FROM musterd.parents_aborting p WHERE p.id = p_id) THEN
            RETURN 'locked';
        END IF;
    END IF;
    IF musterd.has_pending_children(p_id) THEN
        RETURN 'open';
    END IF;
    PERFORM musterd.finish_parent(v_task);
    RETURN 'completed';
END $$;
COMMENT ON FUNCTION musterd.complete_parent(bigint) IS
    'Internal: complete_scopes for a task without rows, after the locks; its uncles and listeners are the caller''s. An uncle whose last '
    'dependency has ended is started.';

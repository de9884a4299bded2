-- What workers call: claims and outcomes of tasks, and where a structured queue looks. (The statements on blocks and outcomes of rows
-- are the worker's own, in src/store/sql.)
-- They are plpgsql with plans that are made once: a plan for each call costs more than the call.
--
-- Rule of this file: locks in the order of ids before anything is decided, everything guarded by the token, and no scope is
-- completed here: the worker asks for that after its commit.

-- ----------------------------------------------------------------------------------------------------------------- claims

CREATE FUNCTION musterd.make_ready(p_queue text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
BEGIN
    IF EXISTS (SELECT FROM musterd.task_tickets k WHERE k.queue = p_queue AND NOT k.ready AND k.due_at <= clock_timestamp()) THEN
        UPDATE musterd.task_tickets k SET ready = true
         WHERE k.id = ANY (ARRAY (
                   SELECT d.id FROM musterd.task_tickets d WHERE d.queue = p_queue AND NOT d.ready AND d.due_at <= clock_timestamp()
                    ORDER BY d.due_at LIMIT 5000 FOR UPDATE SKIP LOCKED));
    END IF;
END $$;
COMMENT ON FUNCTION musterd.make_ready(text) IS 'Internal: tickets of a queue whose time has come can be claimed from now on.';

CREATE FUNCTION musterd.ready_heads(p_queue text, p_commands text[], p_scope bigint, p_any_priority boolean, p_limit int,
                                    p_hint_priority int, p_hint bigint) RETURNS SETOF musterd.task_tickets
LANGUAGE plpgsql STABLE ROWS 4 SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    IF p_scope > 0 THEN
        RETURN QUERY
        SELECT k.* FROM musterd.task_tickets k
         WHERE k.parent_id = p_scope AND k.ready AND k.crashes = 0 AND k.queue = p_queue AND k.command = ANY (p_commands)
         ORDER BY k.priority, k.id LIMIT 1;
    ELSIF p_any_priority THEN
        -- The oldest of every priority: one probe of the index for each command and priority there is.
        RETURN QUERY
        WITH RECURSIVE lanes (command, head) AS (
            SELECT c.command, (SELECT k FROM musterd.task_tickets k
                                WHERE k.queue = p_queue AND k.command = c.command AND k.ready AND k.crashes = 0
                                  AND (p_scope IS NULL OR k.parent_id IS NULL)
                                ORDER BY k.priority, k.id LIMIT 1)
              FROM unnest(p_commands) c (command)
            UNION ALL
            SELECT l.command, (SELECT k FROM musterd.task_tickets k
                                WHERE k.queue = p_queue AND k.command = l.command AND k.ready AND k.crashes = 0
                                  AND k.priority > (l.head).priority AND (p_scope IS NULL OR k.parent_id IS NULL)
                                ORDER BY k.priority, k.id LIMIT 1)
              FROM lanes l WHERE (l.head).id IS NOT NULL)
        SELECT (l.head).* FROM lanes l WHERE (l.head).id IS NOT NULL AND (l.head).priority <= p_limit ORDER BY (l.head).id;
    ELSE
        RETURN QUERY
        SELECT h.* FROM unnest(p_commands) c (command)
         CROSS JOIN LATERAL (
               (SELECT k.* FROM musterd.task_tickets k
                 WHERE k.queue = p_queue AND k.command = c.command AND k.ready AND k.crashes = 0 AND k.priority < p_hint_priority
                   AND (p_scope IS NULL OR k.parent_id IS NULL)
                 ORDER BY k.priority, k.id LIMIT 1)
               UNION ALL
               -- What was claimed a moment ago is behind us: under a held snapshot its dead entries would be walked over again and again.
               (SELECT k.* FROM musterd.task_tickets k
                 WHERE k.queue = p_queue AND k.command = c.command AND k.ready AND k.crashes = 0 AND (k.priority, k.id) > (p_hint_priority, p_hint)
                   AND (p_scope IS NULL OR k.parent_id IS NULL)
                 ORDER BY k.priority, k.id LIMIT 1)) h
         WHERE h.priority <= p_limit
         ORDER BY h.priority, h.id;
    END IF;
END $$;
COMMENT ON FUNCTION musterd.ready_heads(text, text[], bigint, boolean, int, int, bigint) IS
    'Internal: the first ticket of each of these commands, best first; with p_any_priority of each priority, oldest first. p_scope: null '
    'for all, 0 for top-level tasks, else the children of this task. p_limit: no worse priority than this. Behind the hint only.';

CREATE FUNCTION musterd.rows_priority(p_queue text, p_row_commands text[], p_scope bigint) RETURNS int
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN LEAST(
        (SELECT b.priority FROM musterd.batches b
          WHERE b.queue = p_queue AND b.open AND b.next_line <= b.rows AND NOT b.canary_only AND b.command = ANY (p_row_commands)
            AND (p_scope IS NULL OR EXISTS (SELECT FROM musterd.task_records p WHERE p.id = b.id AND p.parent_id = p_scope))
          ORDER BY b.priority LIMIT 1),
        (SELECT f.priority FROM musterd.blocks f
          WHERE f.worker IS NULL AND f.queue = p_queue AND f.available_at <= now() AND f.command = ANY (p_row_commands)
            AND (p_scope IS NULL OR EXISTS (SELECT FROM musterd.task_records p WHERE p.id = f.batch_id AND p.parent_id = p_scope))
          ORDER BY f.priority LIMIT 1),
        2147483647);
END $$;
COMMENT ON FUNCTION musterd.rows_priority(text, text[], bigint) IS 'Internal: the best priority of rows that wait in a queue.';

CREATE FUNCTION musterd.take_tickets(p_head musterd.task_tickets, p_scope bigint, p_most int, OUT ids bigint[], OUT last bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    -- At most half a megabyte of payloads as they are stored, but one task at least.
    v_most    int := LEAST(p_most, GREATEST(1, 524288 * p_head.count::bigint / GREATEST(p_head.bytes, 1)));
    v_tickets bigint[];
    v_rest    int;
BEGIN
    WITH locked AS MATERIALIZED (
        -- As many as are claimed and no more: what is locked here in passing, another replica does not see.
        SELECT k.id, k.tasks, k.count
          FROM musterd.task_tickets k
         WHERE k.queue = p_head.queue AND k.command = p_head.command AND k.priority = p_head.priority AND k.id >= p_head.id
           AND k.ready AND k.crashes = 0 AND k.number = p_head.number AND k.keyed = p_head.keyed
           AND (p_scope IS NULL OR k.parent_id IS NOT DISTINCT FROM NULLIF(p_scope, 0))
         ORDER BY k.id LIMIT (v_most + p_head.count - 1) / p_head.count
           FOR UPDATE SKIP LOCKED)
    SELECT array_agg(p.id), max(p.ticket), array_agg(DISTINCT p.ticket) INTO ids, last, v_tickets
      FROM (SELECT l.id AS ticket, i.id FROM locked l CROSS JOIN LATERAL musterd.task_ids(l.tasks) i (id) ORDER BY l.id, i.id LIMIT v_most) p;
    -- Of the last of them something may be left.
    SELECT sum(k.count) - cardinality(ids) INTO v_rest FROM musterd.task_tickets k WHERE k.id = ANY (v_tickets);
    IF v_rest > 0 THEN
        UPDATE musterd.task_tickets k
           SET tasks = k.tasks - musterd.id_set(ids), bytes = k.bytes * v_rest / k.count, count = v_rest
         WHERE k.id = last;
        v_tickets := array_remove(v_tickets, last);
    END IF;
    DELETE FROM musterd.task_tickets k WHERE k.id = ANY (v_tickets);
END $$;
COMMENT ON FUNCTION musterd.take_tickets(musterd.task_tickets, bigint, int) IS
    'Internal: takes up to p_most tasks off this ticket and those like it behind it. Null: others have them locked.';

CREATE FUNCTION musterd.pass_by_locked(p_head musterd.task_tickets, p_ids bigint[]) RETURNS bigint[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_mine   bigint[] := ARRAY (SELECT t.id FROM musterd.task_records t WHERE t.id = ANY (p_ids) ORDER BY t.id FOR NO KEY UPDATE SKIP LOCKED);
    v_theirs bigint[] := ARRAY (SELECT i FROM unnest(p_ids) i EXCEPT SELECT i FROM unnest(v_mine) i);
BEGIN
    UPDATE musterd.task_records t SET claimed_at = clock_timestamp()
     WHERE t.id = ANY (v_mine) AND t.state = 'queued' AND t.ticket = p_head.number;
    IF v_theirs <> '{}' THEN
        INSERT INTO musterd.task_tickets (queue, command, priority, parent_id, tasks, count, number, crashes, keyed, bytes, due_at, ready)
        VALUES (p_head.queue, p_head.command, p_head.priority, p_head.parent_id, musterd.id_set(v_theirs), cardinality(v_theirs),
                p_head.number, p_head.crashes, true, p_head.bytes, p_head.due_at, true);
    END IF;
    RETURN v_mine;
END $$;
COMMENT ON FUNCTION musterd.pass_by_locked(musterd.task_tickets, bigint[]) IS
    'Internal: of tasks with a dedup_key those that no producer has locked, marked as claimed; the others keep a ticket. A producer that '
    'joins a task has it locked until it commits: the run that serves its request sees what it wrote with it.';

CREATE FUNCTION musterd.suspect_ticket(p_queue text, p_worker text, p_commands text[], p_scope bigint, p_solo boolean) RETURNS musterd.task_tickets
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_ticket musterd.task_tickets;
BEGIN
    SELECT k.* INTO v_ticket FROM musterd.task_tickets k
     WHERE k.queue = p_queue AND k.ready AND k.crashes > 0 AND k.command = ANY (p_commands)
       AND (k.count = 1 AND k.crashes >= 2) = p_solo
       AND (p_scope IS NULL OR k.parent_id IS NOT DISTINCT FROM NULLIF(p_scope, 0))
       AND NOT EXISTS (SELECT FROM musterd.paused_queues q WHERE q.name = p_queue)
       AND NOT EXISTS (SELECT FROM musterd.workers w WHERE w.id = p_worker AND w.state = 'dead')
       -- A worker holds one of each kind at a time: should it die again, few are to blame.
       AND NOT EXISTS (SELECT FROM musterd.task_claims c WHERE c.worker = p_worker AND c.crashes > 0 AND (c.open = 1 AND c.crashes >= 2) = p_solo)
     ORDER BY k.priority, k.id LIMIT 1 FOR UPDATE OF k SKIP LOCKED;
    IF FOUND THEN
        DELETE FROM musterd.task_tickets k WHERE k.id = v_ticket.id;
    END IF;
    RETURN v_ticket;
END $$;
COMMENT ON FUNCTION musterd.suspect_ticket(text, text, text[], bigint, boolean) IS
    'Internal: takes a ticket of tasks that processes died with; with p_solo one of a task that is to run with nothing beside it.';

CREATE TYPE musterd.claimed_task AS (
    token        uuid,
    id           bigint,
    parent_id    bigint,
    queue        text,
    command      text,
    payload      jsonb,
    attempt      int,
    max_attempts int,
    crashes      int,
    solo_crashes int,
    is_solo      boolean,
    traceparent  text,
    timeout_ms   bigint,
    waited       float8,
    priority     int,
    ticket       bigint
);
COMMENT ON TYPE musterd.claimed_task IS 'A task as a claim hands it to its worker. A null id: there are tasks, and others have them locked.';

CREATE FUNCTION musterd.claimed_tasks(p_tokens uuid[], p_priority int DEFAULT NULL, p_ticket bigint DEFAULT NULL) RETURNS SETOF musterd.claimed_task
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    RETURN QUERY
    SELECT k.token, t.id, t.parent_id, t.queue, t.command, t.payload, t.attempt, t.max_attempts, t.crashes, t.solo_crashes,
           t.crashes >= 2 AND k.tasks = int8multirange(int8range(t.id, t.id + 1)), t.traceparent,
           (EXTRACT(EPOCH FROM t.timeout) * 1000)::bigint,
           date_part('epoch', clock_timestamp() - GREATEST(t.run_at, t.created_at)), p_priority, p_ticket
      FROM musterd.task_claims k
     CROSS JOIN LATERAL musterd.task_ids(k.tasks) i (id)
     -- OFFSET 0: looked up one by one, whatever the planner knows of the table.
     CROSS JOIN LATERAL (SELECT r.* FROM musterd.task_records r WHERE r.id = i.id AND r.state = 'queued' AND r.ticket = k.number OFFSET 0) t
     WHERE k.token = ANY (p_tokens);
END $$;
COMMENT ON FUNCTION musterd.claimed_tasks(uuid[], int, bigint) IS 'The tasks that are held by claims with these tokens.';

CREATE FUNCTION musterd.claim_tasks(p_queue text, p_worker text, p_tokens uuid[], p_commands text[], p_most int[], p_durable text[],
                                    p_scope bigint DEFAULT NULL, p_any_priority boolean DEFAULT false, p_row_commands text[] DEFAULT NULL,
                                    p_beside int DEFAULT 1, p_hint_priority int DEFAULT -2147483648, p_hint bigint DEFAULT 0) RETURNS SETOF musterd.claimed_task
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    v_limit int := 2147483647;
    v_head  musterd.task_tickets;
    v_ids   bigint[];
    v_last  bigint;
    v_busy  boolean := false;
    v_busy_task musterd.claimed_task;
    v_used  int := 0;
BEGIN
    -- A worker that was declared dead and does not know it yet claims nothing.
    IF EXISTS (SELECT FROM musterd.paused_queues q WHERE q.name = p_queue)
       OR EXISTS (SELECT FROM musterd.workers w WHERE w.id = p_worker AND w.state = 'dead') THEN
        RETURN;
    END IF;
    -- Losing a claim in a crash of the server only repeats work, which the fence then refuses; but a procedure that crashes the
    -- server must not take its own claim with it, and run for ever.
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM musterd.make_ready(p_queue);

    v_head := musterd.suspect_ticket(p_queue, p_worker, p_commands, p_scope, false);
    IF v_head.id IS NOT NULL THEN
        v_ids := ARRAY (SELECT musterd.task_ids(v_head.tasks));
        IF v_head.keyed THEN
            v_ids := musterd.pass_by_locked(v_head, v_ids);
        END IF;
        IF v_ids <> '{}' THEN
            v_used := 1;
            INSERT INTO musterd.task_claims (token, worker, queue, command, tasks, number, open, crashes)
            VALUES (p_tokens[v_used], p_worker, p_queue, v_head.command, musterd.id_set(v_ids), v_head.number, cardinality(v_ids), v_head.crashes);
            PERFORM set_config('synchronous_commit', 'on', true);
            RETURN QUERY SELECT c.* FROM musterd.claimed_tasks(p_tokens[1:1]) c;
            IF NOT FOUND THEN
                DELETE FROM musterd.task_claims k WHERE k.token = p_tokens[v_used];
            END IF;
        END IF;
    END IF;

    IF p_row_commands IS NOT NULL THEN
        v_limit := musterd.rows_priority(p_queue, p_row_commands, p_scope);
    END IF;
    FOR v_head IN SELECT h.* FROM musterd.ready_heads(p_queue, p_commands, p_scope, p_any_priority, v_limit, p_hint_priority, p_hint) h LOOP
        -- A parent that has begun since the worker looked, with the commit that this task may have come with, goes first.
        IF p_scope IS NOT DISTINCT FROM 0 AND EXISTS (SELECT FROM musterd.begun_parent(p_queue, p_commands, COALESCE(p_row_commands, '{}'))) THEN
            RETURN NEXT v_busy_task;
            RETURN;
        END IF;
        SELECT x.ids, x.last INTO v_ids, v_last
          FROM musterd.take_tickets(v_head, p_scope, LEAST(p_most[array_position(p_commands, v_head.command)],
               CASE WHEN v_head.priority = v_limit THEN GREATEST(p_beside, 1) ELSE 500 END,
               CASE WHEN v_head.command = ANY (p_durable) THEN cardinality(p_tokens) - v_used ELSE 500 END)) x;
        IF v_ids IS NULL THEN
            v_busy := true;
            CONTINUE;
        END IF;
        IF v_head.keyed THEN
            v_ids := musterd.pass_by_locked(v_head, v_ids);
            CONTINUE WHEN v_ids = '{}';
        END IF;
        IF v_head.command = ANY (p_durable) THEN
            -- A claim for each: their outcomes are written by transactions of their own.
            PERFORM set_config('synchronous_commit', 'on', true);
            INSERT INTO musterd.task_claims (token, worker, queue, command, tasks, number, open, crashes)
            SELECT p_tokens[v_used + u.place], p_worker, p_queue, v_head.command, int8multirange(int8range(u.id, u.id + 1)), v_head.number, 1, 0
              FROM unnest(v_ids) WITH ORDINALITY u (id, place);
        ELSE
            INSERT INTO musterd.task_claims (token, worker, queue, command, tasks, number, open, crashes)
            VALUES (p_tokens[v_used + 1], p_worker, p_queue, v_head.command, musterd.id_set(v_ids), v_head.number, cardinality(v_ids), 0);
        END IF;
        RETURN QUERY SELECT c.* FROM musterd.claimed_tasks(p_tokens[v_used + 1:], v_head.priority, v_last) c;
        IF FOUND THEN
            RETURN;
        END IF;
        -- Void tickets all: on with the next.
        DELETE FROM musterd.task_claims k WHERE k.token = ANY (p_tokens[v_used + 1:]);
        v_busy := true;
    END LOOP;
    IF v_busy THEN
        RETURN NEXT v_busy_task;
    END IF;
END $$;
COMMENT ON FUNCTION musterd.claim_tasks(text, text, uuid[], text[], int[], text[], bigint, boolean, text[], int, int, bigint) IS
    'Claims tasks of one command for a worker: those of the best priority, oldest first, at most p_most of the command. Commands in '
    'p_durable get a token for each task, the others one for all; tasks that a process died with one more. p_row_commands: '
    'no tasks behind rows of these, and at most p_beside beside them. Tickets up to the hint are passed by.';

CREATE FUNCTION musterd.claim_solo_task(p_queue text, p_worker text, p_token uuid, p_commands text[]) RETURNS SETOF musterd.claimed_task
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_ticket musterd.task_tickets := musterd.suspect_ticket(p_queue, p_worker, p_commands, NULL, true);
BEGIN
    IF v_ticket.id IS NOT NULL THEN
        INSERT INTO musterd.task_claims (token, worker, queue, command, tasks, number, open, crashes)
        VALUES (p_token, p_worker, p_queue, v_ticket.command, v_ticket.tasks, v_ticket.number, 1, v_ticket.crashes);
        RETURN QUERY SELECT c.* FROM musterd.claimed_tasks(ARRAY[p_token]) c;
        IF NOT FOUND THEN
            DELETE FROM musterd.task_claims k WHERE k.token = p_token;
        END IF;
    END IF;
END $$;
COMMENT ON FUNCTION musterd.claim_solo_task(text, text, uuid, text[]) IS
    'Claims a task that is to run with nothing beside it, if there is one and this worker has none yet.';

-- --------------------------------------------------------------------------------------------------------------- outcomes

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
                  FROM unnest(p_outcomes) o JOIN musterd.task_records t ON t.id = o.id
                 WHERE t.parent_id IS NOT NULL AND COALESCE(o.spawn, o.after) IS NOT NULL) l
         GROUP BY l.id ORDER BY l.id
    LOOP
        IF v_lock.own THEN
            PERFORM 1 FROM musterd.task_records t WHERE t.id = v_lock.id FOR NO KEY UPDATE;
        ELSE
            PERFORM 1 FROM musterd.task_records t WHERE t.id = v_lock.id FOR SHARE;
        END IF;
    END LOOP;
END $$;
COMMENT ON FUNCTION musterd.lock_for_outcomes(musterd.task_outcome[]) IS
    'Internal: locks the tasks of these outcomes, and the parents their siblings will join, in the order of ids.';

CREATE FUNCTION musterd.with_children(p_ids bigint[]) RETURNS bigint[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    -- One look for all of them: as a rule none has any.
    IF NOT EXISTS (SELECT FROM musterd.task_records c
                    WHERE c.parent_id BETWEEN (SELECT min(i) FROM unnest(p_ids) i) AND (SELECT max(i) FROM unnest(p_ids) i)) THEN
        RETURN '{}';
    END IF;
    RETURN ARRAY (SELECT i FROM unnest(p_ids) i WHERE EXISTS (SELECT FROM musterd.task_records c WHERE c.parent_id = i));
END $$;
COMMENT ON FUNCTION musterd.with_children(bigint[]) IS 'Internal: those of these tasks that have children now, whatever their state.';

CREATE FUNCTION musterd.finish_tasks(p_outcomes musterd.task_outcome[], p_pass_by_locked boolean DEFAULT false)
RETURNS TABLE (task_id bigint, task_state musterd.state, scope_id bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_ids    bigint[];
    v_states musterd.state[];
    v_scopes bigint[];
    v_ended  bigint[];
    v_again  bigint[];
    v_tokens uuid[];
    v_parents bigint[];
    v_late   bigint[];
    v_uncles bigint[];
    v_uncle  record;
BEGIN
    -- The fence: what recovers these claims waits for us, or we find them gone.
    PERFORM 1 FROM musterd.task_claims k
      WHERE k.token = ANY (ARRAY (SELECT DISTINCT o.token FROM unnest(p_outcomes) o)) ORDER BY k.token FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF p_pass_by_locked THEN
        p_outcomes := ARRAY (
            SELECT o FROM unnest(p_outcomes) o
             CROSS JOIN LATERAL (SELECT t.id FROM musterd.task_records t WHERE t.id = o.id FOR NO KEY UPDATE SKIP LOCKED) t
             ORDER BY o.id);
    END IF;
    IF EXISTS (SELECT FROM unnest(p_outcomes) o WHERE o.spawn IS NOT NULL OR o.after IS NOT NULL) THEN
        PERFORM musterd.lock_for_outcomes(ARRAY (SELECT o FROM unnest(p_outcomes) o WHERE o.spawn IS NOT NULL OR o.after IS NOT NULL));
        -- Children first: whether a task has any decides what becomes of it.
        INSERT INTO musterd.task_records (command, payload, parent_id, queue, priority, child_key, traceparent)
        SELECT s.child ->> 'command', COALESCE(s.child -> 'payload', '{}'), COALESCE(t.parent_id, t.id), s.child ->> 'queue',
               (s.child ->> 'priority')::int, s.child ->> 'child_key', t.traceparent
          FROM unnest(p_outcomes) o
          JOIN musterd.task_claims k ON k.token = o.token
          JOIN musterd.task_records t ON t.id = o.id AND t.state = 'queued' AND t.ticket = k.number AND k.tasks @> t.id
         CROSS JOIN LATERAL jsonb_array_elements(COALESCE(o.spawn, '[]')) WITH ORDINALITY s (child, place)
         WHERE o.outcome = 'succeeded'
         ORDER BY t.id, s.place
            ON CONFLICT (parent_id, child_key) WHERE parent_id IS NOT NULL DO NOTHING;
        FOR v_uncle IN
            SELECT t.id, a.uncle
              FROM unnest(p_outcomes) o
              JOIN musterd.task_claims k ON k.token = o.token
              JOIN musterd.task_records t ON t.id = o.id AND t.state = 'queued' AND t.ticket = k.number AND k.tasks @> t.id
             CROSS JOIN LATERAL jsonb_array_elements(COALESCE(o.after, '[]')) WITH ORDINALITY a (uncle, place)
             WHERE o.outcome = 'succeeded'
             ORDER BY t.id, a.place
        LOOP
            PERFORM musterd.check_name(format('command of an uncle of task %s', v_uncle.id), v_uncle.uncle ->> 'command');
            -- An uncle of a child waits for the scope, not for the one child that asked for it.
            PERFORM musterd.enqueue_after(
                v_uncle.uncle ->> 'command', COALESCE(v_uncle.uncle -> 'payload', '{}'),
                ARRAY (SELECT COALESCE(t.parent_id, t.id) FROM musterd.task_records t WHERE t.id = v_uncle.id),
                queue => v_uncle.uncle ->> 'queue', priority => (v_uncle.uncle ->> 'priority')::int,
                dedup_key => v_uncle.uncle ->> 'dedup_key',
                dedup_replace => COALESCE((v_uncle.uncle ->> 'dedup_replace')::boolean, false));
        END LOOP;
    END IF;

    v_parents := musterd.with_children(ARRAY (SELECT o.id FROM unnest(p_outcomes) o));
    WITH claims AS MATERIALIZED (  -- one or two: read once, not once for each task
        SELECT k.token, k.number, k.tasks, k.claimed_at, k.alone_at, k.results FROM musterd.task_claims k
         WHERE k.token = ANY (ARRAY (SELECT DISTINCT o.token FROM unnest(p_outcomes) o))),
    written AS (
        UPDATE musterd.task_records t
           SET state = CASE WHEN o.again THEN 'queued'
                            WHEN o.has_children THEN 'waiting'
                            WHEN o.outcome = 'succeeded' THEN 'succeeded'
                            ELSE 'failed' END::musterd.state,
               ticket = CASE WHEN o.again THEN t.ticket + 1 ELSE t.ticket END,
               attempt = CASE WHEN o.outcome = 'retry' THEN t.attempt + 1 ELSE t.attempt END,
               crashes = CASE WHEN o.outcome = 'crashed' THEN t.crashes + 1 ELSE t.crashes END,
               -- Only a crash of a task that ran with nothing beside it is its own.
               solo_crashes = CASE WHEN o.outcome = 'crashed' AND o.alone_at IS NOT NULL THEN t.solo_crashes + 1 ELSE t.solo_crashes END,
               -- No wait is longer than a year, whatever a service asked for: the calendar has an end.
               run_at = CASE WHEN o.again THEN clock_timestamp() + LEAST(COALESCE(o.wait, 0), 31622400) * interval '1 second' ELSE t.run_at END,
               result = COALESCE(o.result, o.results -> t.id::text, t.result),
               error = CASE o.outcome WHEN 'succeeded' THEN NULL ELSE COALESCE(o.error, t.error) END,
               finished_at = CASE WHEN NOT (o.again OR o.has_children) THEN clock_timestamp() END,
               claimed_at = o.claimed_at
          FROM (SELECT u.id, u.outcome, u.result, u.error, u.wait, u.outcome IN ('retry', 'crashed', 'give_back') AS again,
                       u.token, k.number, k.tasks, k.claimed_at, k.alone_at, k.results,
                       u.id = ANY (v_parents) AS has_children, r.place
                  FROM unnest(p_outcomes) u
                  JOIN claims k ON k.token = u.token
                 CROSS JOIN LATERAL (SELECT r.ctid AS place FROM musterd.task_records r WHERE r.id = u.id OFFSET 0) r
                 ORDER BY u.id) o
         -- By place: looked up in the order of ids, whatever the planner knows of the table.
         WHERE t.ctid = o.place AND t.state = 'queued' AND t.ticket = o.number AND o.tasks @> t.id
        RETURNING o.token, t.id, CASE WHEN t.state = 'queued' AND (o.wait > 0 OR o.outcome <> 'give_back') THEN 'scheduled' ELSE t.state END AS state, t.parent_id)
    SELECT array_agg(w.id), array_agg(w.state), array_agg(COALESCE(w.parent_id, CASE WHEN w.state = 'waiting' THEN w.id END)),
           array_agg(w.id) FILTER (WHERE w.state IN ('succeeded', 'failed')), array_agg(w.id) FILTER (WHERE w.state IN ('queued', 'scheduled')),
           array_agg(w.token)
      INTO v_ids, v_states, v_scopes, v_ended, v_again, v_tokens FROM written w;
    IF v_ids IS NULL THEN
        RETURN;
    END IF;

    -- They are locked now. A child that was committed while we waited for its parent makes that one wait after all.
    v_late := musterd.with_children(v_ended);
    IF v_late <> '{}' THEN
        UPDATE musterd.task_records t SET state = 'waiting', finished_at = NULL WHERE t.id = ANY (v_late);
        v_ended := ARRAY (SELECT e FROM unnest(v_ended) e WHERE e <> ALL (v_late));
        v_states := ARRAY (SELECT CASE WHEN u.id = ANY (v_late) THEN 'waiting' ELSE u.state END FROM unnest(v_ids, v_states) WITH ORDINALITY u (id, state, n) ORDER BY u.n);
        v_scopes := ARRAY (SELECT CASE WHEN u.id = ANY (v_late) THEN COALESCE(u.scope, u.id) ELSE u.scope END
                             FROM unnest(v_ids, v_scopes) WITH ORDINALITY u (id, scope, n) ORDER BY u.n);
    END IF;
    IF v_ended <> '{}' THEN
        v_uncles := musterd.release_uncles(v_ended);
        PERFORM musterd.tell_states(array_agg(u.id), array_agg(u.state))
           FROM unnest(v_ids, v_states) u (id, state) WHERE musterd.is_final(u.state);
    END IF;
    IF v_again <> '{}' THEN
        PERFORM musterd.issue_tickets(v_again);
    END IF;
    -- Children that were there before are claimable in a structured queue only now.
    IF 'waiting' = ANY (v_states) THEN
        PERFORM musterd.wake_structured(q.queue)
           FROM (SELECT DISTINCT c.queue FROM unnest(v_ids, v_states) u (id, state) JOIN musterd.task_records c ON c.parent_id = u.id
                  WHERE u.state = 'waiting') q;
    END IF;
    WITH done AS (
        SELECT w.token, count(*) AS count FROM unnest(v_tokens) w (token) GROUP BY w.token),
    gone AS (DELETE FROM musterd.task_claims k USING done d WHERE k.token = d.token AND k.open <= d.count)
    UPDATE musterd.task_claims k SET open = k.open - d.count FROM done d WHERE k.token = d.token AND k.open > d.count;
    RETURN QUERY SELECT u.id, u.state, u.scope FROM unnest(v_ids, v_states, v_scopes) u (id, state, scope);
    RETURN QUERY SELECT NULL::bigint, NULL::musterd.state, u FROM unnest(v_uncles) u;
END $$;
COMMENT ON FUNCTION musterd.finish_tasks(musterd.task_outcome[], boolean) IS
    'Writes the outcomes of tasks that are still held with their tokens: children, uncles and state in one. Returns a row for '
    'each that was held, with its new state and the scope to check after the commit, and one without a task for each uncle to check '
    'then; the others were refused. With p_pass_by_locked it waits for no lock on a task: those that others have locked are left '
    'as they are, and still held.';

CREATE FUNCTION musterd.free_claims(p_worker text, p_tokens uuid[], p_max_crashes int DEFAULT 3, p_ran bigint[] DEFAULT '{}')
RETURNS TABLE (freed int, failed int, scopes bigint[])
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v_claim   record;
    v_ids     bigint[];
    v_held    int;
    v_deaths  int;
    v_died    boolean;
    v_scope   bigint;
BEGIN
    freed := 0; failed := 0; scopes := '{}';
    FOR v_claim IN
        SELECT k.*, p_tokens IS NULL AND NOT COALESCE(k.claimed_at > w.ended_at, false) AS started
          FROM musterd.task_claims k
          LEFT JOIN musterd.workers w ON w.id = k.worker
         WHERE CASE WHEN p_tokens IS NULL THEN w.id IS NULL OR NOT musterd.is_alive(w.state)
                    ELSE k.worker = p_worker AND k.token = ANY (p_tokens) END
         -- What is said to have been running comes back first: a worker holds one suspect at a time.
         ORDER BY NOT EXISTS (SELECT FROM unnest(p_ran) r WHERE k.tasks @> r), k.claimed_at LIMIT 500
           FOR UPDATE OF k SKIP LOCKED
    LOOP
        BEGIN  -- a subtransaction for each: one that cannot be freed keeps no other with the dead
            -- A zombie may claim after its end was declared; what it claimed then has harmed no process.
            v_died := v_claim.started;
            SELECT count(*) INTO v_held FROM musterd.task_ids(v_claim.tasks) i (id)
              JOIN musterd.task_records t ON t.id = i.id AND t.state = 'queued' AND t.ticket = v_claim.number;
            -- What others have locked waits for the next look, still held.
            v_ids := ARRAY (
                SELECT t.id FROM musterd.task_records t
                 WHERE t.id = ANY (ARRAY (SELECT musterd.task_ids(v_claim.tasks))) AND t.state = 'queued' AND t.ticket = v_claim.number
                 ORDER BY t.id FOR NO KEY UPDATE SKIP LOCKED);
            SELECT max(t.solo_crashes) + 1 INTO v_deaths FROM musterd.task_records t WHERE t.id = ANY (v_ids);
            IF v_died AND v_claim.alone_at IS NOT NULL AND v_deaths >= p_max_crashes THEN
                FOR v_scope IN
                    SELECT f.scope_id FROM musterd.finish_tasks(ARRAY (
                        SELECT ROW (i, v_claim.token, 'failed', NULL, format('the worker process died %s times while it ran this task and nothing '
                                    'else (liveness.max_crashes)', v_deaths), NULL, NULL, NULL)::musterd.task_outcome FROM unnest(v_ids) i)) f
                LOOP
                    failed := failed + 1;
                    scopes := scopes || v_scope;
                END LOOP;
            ELSE
                UPDATE musterd.task_records t
                   SET ticket = t.ticket + 1, run_at = now(), crashes = t.crashes + v_died::int,
                       solo_crashes = t.solo_crashes + (v_died AND v_claim.alone_at IS NOT NULL)::int
                 WHERE t.id = ANY (v_ids);
                -- What had started is suspect, and comes back in eighths, so that the task that kills is soon alone.
                PERFORM musterd.issue_tickets(p.ids)
                   FROM (SELECT array_agg(x.id) AS ids
                           FROM (SELECT i AS id, CASE WHEN v_died THEN ntile(8) OVER (ORDER BY i <> ALL (p_ran), i) ELSE 1 END AS piece FROM unnest(v_ids) i) x
                          GROUP BY x.piece ORDER BY x.piece) p;
                freed := freed + cardinality(v_ids);
            END IF;
            IF v_held <= cardinality(v_ids) THEN
                DELETE FROM musterd.task_claims k WHERE k.token = v_claim.token;
            END IF;
        EXCEPTION
            -- Not a cancel, nor what is the whole server's: those end the call.
            WHEN raise_exception OR data_exception OR integrity_constraint_violation OR program_limit_exceeded THEN
                RAISE WARNING 'the claim % of worker % cannot be freed: %', v_claim.token, v_claim.worker, SQLERRM;
        END;
    END LOOP;
    scopes := array_remove(scopes, NULL);
    RETURN NEXT;
END $$;
COMMENT ON FUNCTION musterd.free_claims(text, uuid[], int, bigint[]) IS
    'Puts tasks back into their queues: of owners that do not live (p_tokens null; each has one more crash on its record, and one whose '
    'processes died p_max_crashes times while they ran it and nothing else is failed), or of these claims of a living worker that '
    'does not know them, which charges nothing. Returns how many, and the scopes that may be over now.';

CREATE FUNCTION musterd.finish_own_tasks(p_ids bigint[], p_tokens uuid[])
RETURNS TABLE (task_id bigint, task_state musterd.state, scope_id bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_finished int := 0;
BEGIN
    -- The worker sends BEGIN, the CALLs, this and COMMIT at once. Were the BEGIN refused, each would be a transaction of its own
    -- and this would record successes without the effects; what was set for the transaction is then gone.
    IF current_setting('musterd.task_id', true) IS DISTINCT FROM p_ids[cardinality(p_ids)]::text THEN
        RAISE EXCEPTION USING ERRCODE = 'no_active_sql_transaction',
            MESSAGE = format('this transaction is not an attempt of task %s', p_ids[cardinality(p_ids)]);
    END IF;
    FOR task_id, task_state, scope_id IN
        SELECT f.* FROM musterd.finish_tasks(ARRAY (
            SELECT ROW (u.id, u.token, 'succeeded', NULL, NULL, 0, NULL, NULL)::musterd.task_outcome
              FROM unnest(p_ids, p_tokens) u (id, token))) f
    LOOP
        v_finished := v_finished + (task_id IS NOT NULL)::int;  -- without a task it is an uncle to check
        RETURN NEXT;
    END LOOP;
    IF v_finished < cardinality(p_ids) THEN
        RAISE EXCEPTION USING ERRCODE = 'MU001',
            MESSAGE = format('not all of the tasks %s are still held with these tokens', p_ids);
    END IF;
END $$;
COMMENT ON FUNCTION musterd.finish_own_tasks(bigint[], uuid[]) IS
    'finish_tasks for the tasks whose procedures ran in this transaction and have succeeded, in this order. Raises MU001 when one is no '
    'longer held with its token, so that a COMMIT that was sent already becomes a rollback and the effects vanish.';

CREATE FUNCTION musterd.clean_session() RETURNS void
-- No SET: this is called after every transaction of a procedure, and names everything in full.
LANGUAGE plpgsql AS $$
DECLARE
    v_name pg_catalog.text;
BEGIN
    PERFORM pg_catalog.pg_advisory_unlock_all();
    FOR v_name IN SELECT p.name FROM pg_catalog.pg_prepared_statements p WHERE p.from_sql LOOP
        EXECUTE pg_catalog.format('DEALLOCATE %I', v_name);
    END LOOP;
END $$;
COMMENT ON FUNCTION musterd.clean_session() IS
    'Internal: takes from a session what a procedure may have left in it and no RESET or DISCARD takes but DISCARD ALL, which '
    'would take the statements that the worker has prepared as well.';

-- ------------------------------------------------------------------------------------------------------- structured queues

CREATE FUNCTION musterd.batch_has_work_now(p_batch musterd.batches, p_row_commands text[]) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT p_batch.aborting
        OR (p_batch.open AND p_batch.next_line <= p_batch.rows AND NOT p_batch.canary_only AND p_batch.command = ANY (p_row_commands))
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
        SELECT FROM musterd.task_records c
          LEFT JOIN musterd.batches b ON b.id = c.id
         WHERE c.parent_id = p_parent_id AND c.queue = p_queue AND musterd.is_unfinished(c.state)
           AND CASE WHEN b.id IS NOT NULL THEN c.state = 'running' AND musterd.batch_has_work_now(b, p_row_commands)
                    ELSE c.state = 'queued' AND c.run_at <= now()
                         AND (c.command = ANY (p_commands)
                              OR EXISTS (SELECT FROM musterd.task_claims k WHERE k.tasks @> c.id AND k.number = c.ticket))
               END);
$$;
COMMENT ON FUNCTION musterd.has_work_now(bigint, text, text[], text[]) IS
    'Internal: whether a child of the task, in this queue, runs or could run now by one of these commands.';

CREATE FUNCTION musterd.is_about_to_end(p_parent_id bigint) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT NOT EXISTS (SELECT FROM musterd.task_records c WHERE c.parent_id = p_parent_id AND musterd.is_unfinished(c.state))
       -- Its end follows the commit of its last child. One that cannot be written, for another transaction has it locked, holds up no queue.
       AND EXISTS (SELECT FROM musterd.task_records c WHERE c.parent_id = p_parent_id AND c.finished_at > clock_timestamp() - interval '5 seconds')
$$;
COMMENT ON FUNCTION musterd.is_about_to_end(bigint) IS
    'Internal: whether the last child of a waiting parent has ended a moment ago, so that its own end is being written.';

CREATE FUNCTION musterd.begun_parent(p_queue text, p_commands text[], p_row_commands text[]) RETURNS TABLE (id bigint, priority int)
LANGUAGE plpgsql STABLE ROWS 1 SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
BEGIN
    RETURN QUERY
    SELECT p.id, p.priority FROM musterd.task_records p
     WHERE p.state = 'waiting' AND (musterd.has_work_now(p.id, p_queue, p_commands, p_row_commands)
                                    OR (p.queue = p_queue AND musterd.is_about_to_end(p.id)))
     ORDER BY p.priority, p.id LIMIT 1;
END $$;
COMMENT ON FUNCTION musterd.begun_parent(text, text[], text[]) IS
    'Internal: the first waiting parent of a structured queue whose children run or could run now, or whose end is being written.';

CREATE FUNCTION musterd.focus(p_queue text, p_commands text[], p_row_commands text[], p_any_priority boolean DEFAULT false,
                              p_tasks boolean DEFAULT true) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_scope record;
    v_batch record;
    v_task  record;
BEGIN
    -- A scope that has begun is brought to its end first. Nothing else begins meanwhile, so none of them can starve.
    SELECT s.id INTO v_scope
      FROM ((SELECT p.id, p.priority FROM musterd.begun_parent(p_queue, p_commands, p_row_commands) p)
            UNION ALL
            (SELECT b.id, b.priority FROM musterd.batches b JOIN musterd.task_records t ON t.id = b.id AND t.parent_id IS NULL
              WHERE b.queue = p_queue AND b.summarized_at IS NULL AND b.open
                AND (b.next_line > 1 OR b.generation > 1 OR b.canary_only) AND musterd.batch_has_work_now(b, p_row_commands)
              ORDER BY b.priority, b.id LIMIT 1)) s
     ORDER BY s.priority, s.id LIMIT 1;
    IF FOUND THEN
        RETURN v_scope.id;
    END IF;

    -- None has: the next top-level task, or the next batch, whichever comes first.
    SELECT b.id, CASE WHEN p_any_priority THEN 0 ELSE b.priority END AS priority INTO v_batch
      FROM musterd.batches b JOIN musterd.task_records t ON t.id = b.id AND t.parent_id IS NULL
     WHERE b.queue = p_queue AND b.open AND b.next_line <= b.rows AND NOT b.canary_only AND b.command = ANY (p_row_commands)
     ORDER BY 2, b.id LIMIT 1;
    IF NOT FOUND OR NOT p_tasks THEN
        RETURN v_batch.id;
    END IF;
    PERFORM musterd.make_ready(p_queue);
    SELECT lower(h.tasks) AS id, CASE WHEN p_any_priority THEN 0 ELSE h.priority END AS priority INTO v_task
      FROM musterd.ready_heads(p_queue, p_commands, 0, p_any_priority, 2147483647, -2147483648, 0) h LIMIT 1;
    RETURN CASE WHEN NOT FOUND OR (v_batch.priority, v_batch.id) < (v_task.priority, v_task.id) THEN v_batch.id END;
END $$;
COMMENT ON FUNCTION musterd.focus(text, text[], text[], boolean, boolean) IS
    'For queues in structured mode: the scope all fibers work on. The first, by priority and id, that has begun and has a '
    'child or row that runs, or could run now by one of these commands, or whose end is being written; else the first batch, unless a '
    'top-level task comes before it. Null: top-level tasks are next.';

-- -------------------------------------------------------------------------------------------------------------- retention
-- What happens after the end. Workers delete in small transactions; each of these functions is one. What it is about to delete it
-- locks without waiting, and it decides in the next statement. Nothing here depends on only one caller at a time: the advisory lock that
-- workers take keeps two of them from doing the same work twice.

CREATE FUNCTION musterd.declare_retention(p_data interval, p_records interval, p_held interval, p_archive boolean, p_outputs boolean,
                                          p_rules musterd.retention_rules[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO musterd.retention AS g (data, records, held, archive, outputs)
    VALUES (p_data, p_records, p_held, p_archive, p_outputs)
    ON CONFLICT (only_row) DO UPDATE
       SET data = excluded.data, records = excluded.records, held = excluded.held, archive = excluded.archive, outputs = excluded.outputs,
           declared_at = now();
    DELETE FROM musterd.retention_rules r WHERE r.name <> ALL (ARRAY (SELECT n.name FROM unnest(p_rules) n));
    INSERT INTO musterd.retention_rules AS r SELECT n.* FROM unnest(p_rules) n
    ON CONFLICT (name) DO UPDATE
       SET queue = excluded.queue, command = excluded.command, state = excluded.state, data = excluded.data, records = excluded.records;
END $$;
COMMENT ON FUNCTION musterd.declare_retention(interval, interval, interval, boolean, boolean, musterd.retention_rules[]) IS
    'For workers, when they start: [retention] of their configuration. The latest one counts, for all replicas and for musterd prune.';

CREATE FUNCTION musterd.begin_prune_pass(p_every interval) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE musterd.retention g SET passed_at = clock_timestamp()
     WHERE g.passed_at IS NULL OR g.passed_at + p_every <= clock_timestamp();
    RETURN FOUND;
END $$;
COMMENT ON FUNCTION musterd.begin_prune_pass(interval) IS 'True for the one worker that does the next pass; the others ask again later.';

CREATE FUNCTION musterd.due_batches(p_after bigint, p_limit int) RETURNS SETOF musterd.batches_to_prune
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    RETURN QUERY SELECT d.* FROM musterd.batches_to_prune d WHERE d.id > p_after ORDER BY d.id LIMIT p_limit;
END $$;
COMMENT ON FUNCTION musterd.due_batches(bigint, int) IS
    'A page of batches_to_prune in the order of their ids, behind p_after; through the index of batches that still have rows.';

CREATE FUNCTION musterd.prune_batch(p_id bigint, p_generation int, p_archive jsonb DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    -- A redrive has these locked, or comes after us and is refused. Not waited for: the next pass finds the batch again.
    PERFORM 1 FROM musterd.batches b WHERE b.id = p_id FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM 1 FROM musterd.task_records t WHERE t.id = p_id FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE musterd.batches b
       SET data_gone_at = clock_timestamp(), archive = p_archive, record_until = d.record_until
      FROM musterd.batches_to_prune d
     WHERE d.id = p_id AND b.id = d.id AND d.generation = p_generation AND d.data_gone_at IS NULL
       AND (p_archive IS NOT NULL OR NOT (SELECT g.archive FROM musterd.retention g));
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE musterd.task_records t SET payload = '{}', data_gone_at = clock_timestamp() WHERE t.id = p_id;
    RETURN true;
END $$;
COMMENT ON FUNCTION musterd.prune_batch(bigint, int, jsonb) IS
    'From now on the rows of this batch cannot be read or run again; prune_rows then deletes them. False, and nothing is changed, when they '
    'must stay: it was redriven since (another generation), its time has not come, it is held, needed or locked, or an archive is '
    'wanted and none was given.';

CREATE FUNCTION musterd.prune_rows(p_id bigint, p_from int, OUT next int, OUT bytes bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_rows int;
    v_to   int;
    v_more bigint;
BEGIN
    bytes := 0;
    next := p_from;
    SELECT b.rows INTO v_rows FROM musterd.batches b
     WHERE b.id = p_id AND b.data_gone_at IS NOT NULL AND NOT b.data_deleted FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- Deleted again after a crash, if it is lost.
    PERFORM set_config('synchronous_commit', 'off', true);
    -- As many lines as 100 chunks or 16 MiB have, one chunk at least.
    SELECT max(c.last_line) INTO v_to
      FROM (SELECT k.last_line, row_number() OVER w AS place, sum(pg_column_size(k.inputs)) OVER w AS size
              FROM (SELECT c.* FROM musterd.chunks c WHERE c.batch_id = p_id AND c.first_line >= p_from ORDER BY c.first_line LIMIT 100) k
            WINDOW w AS (ORDER BY k.first_line)) c
     WHERE c.place = 1 OR c.size <= 16777216;
    v_to := COALESCE(v_to, v_rows);

    WITH gone AS (DELETE FROM musterd.chunks c WHERE c.batch_id = p_id AND c.first_line BETWEEN p_from AND v_to
                  RETURNING pg_column_size(c.inputs) AS size)
    SELECT COALESCE(sum(g.size), 0) INTO bytes FROM gone g;
    WITH gone AS (DELETE FROM musterd.outcomes o WHERE o.batch_id = p_id AND o.first_line > 0 AND o.first_line BETWEEN p_from AND v_to
                  RETURNING COALESCE(pg_column_size(o.results), 0) + COALESCE(pg_column_size(o.outputs), 0) + 100 AS size)
    SELECT COALESCE(sum(g.size), 0) INTO v_more FROM gone g;
    bytes := bytes + v_more;
    WITH gone AS (DELETE FROM musterd.failures f WHERE f.batch_id = p_id AND f.line BETWEEN p_from AND v_to
                  RETURNING pg_column_size(f.error) + 60 AS size)
    SELECT COALESCE(sum(g.size), 0) INTO v_more FROM gone g;
    bytes := bytes + v_more;
    WITH gone AS (DELETE FROM musterd.failures_history f WHERE f.batch_id = p_id AND f.line BETWEEN p_from AND v_to
                  RETURNING pg_column_size(f.error) + 60 AS size)
    SELECT COALESCE(sum(g.size), 0) INTO v_more FROM gone g;
    bytes := bytes + v_more;

    next := v_to + 1;
    IF v_to >= v_rows THEN
        -- Outcomes without a line (everything failed), and what does not belong there.
        DELETE FROM musterd.outcomes o WHERE o.batch_id = p_id;
        UPDATE musterd.batches b SET data_deleted = true WHERE b.id = p_id;
        next := NULL;
    END IF;
END $$;
COMMENT ON FUNCTION musterd.prune_rows(bigint, int) IS
    'Deletes a bite of the rows of a batch after prune_batch, from line p_from on. next: where the next bite begins; null: nothing is left; '
    'p_from again: another transaction has the batch locked. bytes: about what they took.';

CREATE FUNCTION musterd.outputs_gone(p_id bigint) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE musterd.batches b SET outputs_gone = true WHERE b.id = p_id AND b.data_gone_at IS NOT NULL
$$;
COMMENT ON FUNCTION musterd.outputs_gone(bigint) IS 'For workers: the output files of this batch were deleted with its data.';

CREATE FUNCTION musterd.prune_bodies(p_trees bigint[], p_limit int) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_ids    bigint[];
    v_locked bigint[];
    v_gone   int;
BEGIN
    v_ids := ARRAY (
        (SELECT t.id FROM musterd.task_records t WHERE t.id = ANY (p_trees) AND t.data_gone_at IS NULL
         UNION ALL
         SELECT c.id FROM musterd.task_records c WHERE c.parent_id = ANY (p_trees) AND c.data_gone_at IS NULL
           AND NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = c.id))
        LIMIT p_limit);
    v_locked := ARRAY (SELECT t.id FROM musterd.task_records t WHERE t.id = ANY (v_ids) ORDER BY t.id FOR NO KEY UPDATE SKIP LOCKED);
    UPDATE musterd.task_records t
       SET payload = '{}', result = NULL, error = NULL, data_gone_at = clock_timestamp()
     WHERE t.id = ANY (v_locked) AND musterd.is_final(t.state)
       AND COALESCE(t.parent_id, t.id) IN (SELECT d.id FROM musterd.trees_to_prune d WHERE d.id = ANY (p_trees))
       AND NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = t.id);
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    RETURN v_gone;
END $$;
COMMENT ON FUNCTION musterd.prune_bodies(bigint[], int) IS
    'Internal: of these ended top-level tasks and their children, empties payload, result and error; of batches prune_batch does it.';

CREATE FUNCTION musterd.prune_records(p_trees bigint[], p_limit int) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_ids     bigint[];
    v_batches bigint[];
    v_locked  bigint[];
    v_trees   bigint[];
    v_gone    int;
    v_more    int;
BEGIN
    v_ids := ARRAY (SELECT c.id FROM musterd.task_records c WHERE c.parent_id = ANY (p_trees) LIMIT p_limit) || p_trees;
    -- FOR UPDATE, which a delete needs: a producer that has just looked at one (FOR SHARE, or the check of a foreign key) keeps it.
    v_batches := ARRAY (SELECT b.id FROM musterd.batches b WHERE b.id = ANY (v_ids) ORDER BY b.id FOR UPDATE SKIP LOCKED);
    v_locked := ARRAY (
        SELECT t.id FROM musterd.task_records t
         WHERE t.id = ANY (v_ids)
           AND (t.id = ANY (v_batches) OR NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = t.id))
         ORDER BY t.id FOR UPDATE SKIP LOCKED);
    v_trees := ARRAY (SELECT d.id FROM musterd.trees_to_prune d WHERE d.id = ANY (v_locked) AND d.whole);
    -- The children of those alone, and a parent when none of them is left.
    v_ids := ARRAY (SELECT t.id FROM musterd.task_records t WHERE t.id = ANY (v_locked) AND t.parent_id = ANY (v_trees));
    v_ids := v_ids || ARRAY (
        SELECT p FROM unnest(v_trees) p
         WHERE NOT EXISTS (SELECT FROM musterd.task_records c WHERE c.parent_id = p AND c.id <> ALL (v_ids)));
    v_batches := ARRAY (SELECT b FROM unnest(v_batches) b WHERE b = ANY (v_ids));
    DELETE FROM musterd.appends a WHERE a.batch_id = ANY (v_batches);
    DELETE FROM musterd.batches b WHERE b.id = ANY (v_batches);
    DELETE FROM musterd.task_records t WHERE t.id = ANY (v_ids) AND t.parent_id IS NOT NULL;
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    DELETE FROM musterd.task_records t WHERE t.id = ANY (v_ids);
    GET DIAGNOSTICS v_more = ROW_COUNT;
    RETURN v_gone + v_more;
END $$;
COMMENT ON FUNCTION musterd.prune_records(bigint[], int) IS
    'Internal: deletes these ended top-level tasks with their children and batches; of a large tree some of the children first.';

CREATE FUNCTION musterd.prune_tasks(p_after bigint, p_limit int, OUT last bigint, OUT bodies int, OUT records int, OUT abandoned bigint[])
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_page  bigint[] := ARRAY (SELECT t.id FROM musterd.task_records t WHERE t.id > p_after ORDER BY t.id LIMIT p_limit);
    v_trees bigint[];
    v_whole bigint[];
BEGIN
    bodies := 0;
    records := 0;
    -- Ids grow with time: behind a page on which nothing is old enough, nothing is.
    IF NOT EXISTS (SELECT FROM musterd.task_records t CROSS JOIN musterd.shortest_retention() s (shortest)
                    WHERE t.id = ANY (v_page) AND t.created_at + s.shortest <= now()) THEN
        RETURN;
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    last := v_page[cardinality(v_page)];
    SELECT array_agg(d.id) FILTER (WHERE NOT d.whole), array_agg(d.id) FILTER (WHERE d.whole) INTO v_trees, v_whole
      FROM musterd.trees_to_prune d
     WHERE d.id = ANY (v_page)
       AND (d.whole OR EXISTS (SELECT FROM musterd.task_records t WHERE (t.id = d.id OR t.parent_id = d.id) AND t.data_gone_at IS NULL
                                AND NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = t.id)));
    IF v_trees IS NOT NULL THEN
        bodies := musterd.prune_bodies(v_trees, 2 * p_limit);
    END IF;
    IF v_whole IS NOT NULL THEN
        records := musterd.prune_records(v_whole, p_limit);
    END IF;
    IF bodies >= 2 * p_limit OR (records >= p_limit
                             AND EXISTS (SELECT FROM musterd.task_records c WHERE c.parent_id = ANY (v_whole))) THEN
        last := p_after;  -- a large tree: the same page again
    END IF;
    abandoned := ARRAY (
        SELECT t.id FROM musterd.task_records t CROSS JOIN musterd.retention g
         WHERE t.id = ANY (v_page) AND t.parent_id IS NULL AND t.state = 'held' AND t.created_at + g.held <= now());
END $$;
COMMENT ON FUNCTION musterd.prune_tasks(bigint, int) IS
    'A page of the walk through all tasks in the order of their ids, behind p_after: bodies that were emptied, records that were '
    'deleted, and held tasks and batches that may have been abandoned. last: where the next page begins; null: nothing behind it is old enough.';

CREATE FUNCTION musterd.abort_abandoned(p_id bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_task  musterd.task_records := musterd.lock_task(p_id);
    v_since timestamptz := GREATEST(
        v_task.created_at,
        (SELECT max(e.at) FROM musterd.events e WHERE e.batch = p_id OR e.task = p_id),
        (SELECT max(a.created_at) FROM musterd.appends a WHERE a.batch_id = p_id));
BEGIN
    IF v_task.state <> 'held' OR v_since + (SELECT g.held FROM musterd.retention g) <= now() IS NOT TRUE THEN
        RETURN false;
    END IF;
    PERFORM musterd.record_steering('abandoned', p_id, jsonb_build_object('since', v_since));
    PERFORM musterd.abort(p_id);
    RETURN true;
END $$;
COMMENT ON FUNCTION musterd.abort_abandoned(bigint) IS
    'Aborts a held task or batch with which nothing was done for as long as [retention] held says.';

CREATE FUNCTION musterd.prune_events(p_after bigint, p_limit int, OUT last bigint, OUT events int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_ids bigint[] := ARRAY (
        SELECT p.id FROM (SELECT e.id, e.at FROM musterd.events e WHERE e.id > p_after ORDER BY e.id LIMIT p_limit) p
         WHERE p.at + (SELECT g.records FROM musterd.retention g) <= now());
BEGIN
    DELETE FROM musterd.events e WHERE e.id = ANY (v_ids);
    GET DIAGNOSTICS events = ROW_COUNT;
    last := (SELECT max(i) FROM unnest(v_ids) i);
END $$;
COMMENT ON FUNCTION musterd.prune_events(bigint, int) IS
    'Deletes a page of events that are older than [retention] records. last: where the next page begins; null: the rest is younger.';

CREATE FUNCTION musterd.record_prune(p_detail jsonb, p_trouble text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE musterd.retention g SET ended_at = clock_timestamp(), trouble = left(p_trouble, 1000);
    IF p_detail IS NOT NULL THEN
        PERFORM musterd.record_event('prune', p_detail => p_detail);
    END IF;
END $$;
COMMENT ON FUNCTION musterd.record_prune(jsonb, text) IS 'For workers: the end of a pass; an event with what went, and what kept data from going.';

CREATE FUNCTION musterd.task_at(p_at timestamptz) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_low  bigint := 0;
    v_high bigint := (SELECT max(t.id) FROM musterd.task_records t);
    v_mid  bigint;
    v_task record;
BEGIN
    WHILE v_low < v_high LOOP
        v_mid := v_low + (v_high - v_low) / 2;
        SELECT t.id, t.created_at INTO v_task FROM musterd.task_records t WHERE t.id > v_mid ORDER BY t.id LIMIT 1;
        IF v_task.created_at < p_at THEN
            v_low := v_task.id;
        ELSE
            v_high := v_mid;
        END IF;
    END LOOP;
    RETURN v_low;
END $$;
COMMENT ON FUNCTION musterd.task_at(timestamptz) IS 'Internal: about the last task that was created before, found by halving the range of ids.';

CREATE FUNCTION musterd.prune_plan(p_data interval DEFAULT NULL, p_records interval DEFAULT NULL)
RETURNS TABLE (what text, items bigint, lines bigint, bytes bigint, oldest timestamptz)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_policy musterd.retention;
    v_kept   numeric;
    v_size   numeric;
    v_first  bigint;
    v_count  bigint;
    v_split  bigint;
BEGIN
    SELECT g.* INTO v_policy FROM musterd.retention g;
    v_policy.data := COALESCE(p_data, v_policy.data, interval '30 days');
    v_policy.records := GREATEST(COALESCE(p_records, v_policy.records, interval '1 year'), v_policy.data);
    -- Of rows the share of all rows that batches say they have: no row is counted.
    SELECT NULLIF(sum(b.rows::numeric), 0) INTO v_kept
      FROM (SELECT e.rows FROM musterd.batches e WHERE e.summarized_at IS NOT NULL AND NOT e.data_deleted
            UNION ALL SELECT o.rows FROM musterd.batches o WHERE o.summarized_at IS NULL) b;
    v_size := pg_total_relation_size('musterd.chunks') + pg_total_relation_size('musterd.outcomes')
            + pg_total_relation_size('musterd.failures') + pg_total_relation_size('musterd.failures_history');
    what := 'rows';
    IF p_data IS NULL THEN
        SELECT count(*), COALESCE(sum(d.rows::bigint), 0), min(d.ended_at) INTO items, lines, oldest FROM musterd.batches_to_prune d;
    ELSE
        SELECT count(*), COALESCE(sum(b.rows::bigint), 0), min(b.summarized_at) INTO items, lines, oldest FROM musterd.batches b
         WHERE b.summarized_at IS NOT NULL AND NOT b.data_deleted AND b.summarized_at + p_data <= now() AND NOT b.data_held;
    END IF;
    bytes := COALESCE(round(v_size * lines / v_kept), 0);
    RETURN NEXT;

    v_first := (SELECT min(t.id) FROM musterd.task_records t);
    v_count := (SELECT max(t.id) - v_first + 1 FROM musterd.task_records t);
    SELECT GREATEST(c.reltuples, 0) / v_count, pg_total_relation_size(c.oid) / GREATEST(c.reltuples, 1)::numeric INTO v_kept, v_size
      FROM pg_class c WHERE c.oid = 'musterd.task_records'::regclass;
    lines := NULL;
    what := 'records';
    v_split := CASE WHEN v_policy.records < interval '9000 years' THEN musterd.task_at(now() - v_policy.records) ELSE 0 END;
    items := COALESCE(round(GREATEST(v_split - v_first + 1, 0) * v_kept), 0);
    bytes := round(items * v_size);
    oldest := (SELECT t.created_at FROM musterd.task_records t WHERE t.id = v_first AND v_split >= v_first);
    RETURN NEXT;
    what := 'bodies';
    v_first := GREATEST(v_first, v_split + 1, COALESCE(v_policy.walked_to, 0) + 1);
    v_split := CASE WHEN v_policy.data < interval '9000 years' THEN musterd.task_at(now() - v_policy.data) ELSE 0 END;
    items := COALESCE(round(GREATEST(v_split - v_first + 1, 0) * v_kept), 0);
    SELECT COALESCE(sum(s.avg_width * (1 - s.null_frac)), 0) INTO v_size FROM pg_stats s
     WHERE s.schemaname = 'musterd' AND s.tablename = 'task_records' AND s.attname IN ('payload', 'result', 'error');
    bytes := round(items * v_size);
    oldest := NULL;
    RETURN NEXT;
END $$;
COMMENT ON FUNCTION musterd.prune_plan(interval, interval) IS
    'What would go now, by estimates that count no row: rows (items: batches; exact), records and bodies of tasks (by where in the ids '
    'the time lies). With arguments: as if [retention] said so.';

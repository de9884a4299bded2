-- Least privilege: four roles without login, to be granted to the users that need them.
--
-- Rule of this file: producers reach what they submitted, through SECURITY DEFINER functions and the views my_tasks and my_batches;
-- operators steer everything and read it; observers read; only workers write tables, see tokens and lock_keys. Everyone else has
-- nothing. A database owner without CREATEROLE gets a notice, not a failed migration: the roles can
-- be made by an administrator, who then calls musterd.grant_roles(). `musterd migrate` calls it every time, after the last
-- migration: what a migration adds needs no grant of its own.

CREATE FUNCTION musterd.make_role(p_role name) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = p_role) THEN
        EXECUTE format('CREATE ROLE %I NOLOGIN', p_role);
    END IF;
    RETURN true;
EXCEPTION
    -- Roles belong to the whole cluster: a migration of another database may be making it at this moment.
    WHEN duplicate_object OR unique_violation THEN
        RETURN true;
    WHEN insufficient_privilege THEN
        RAISE NOTICE 'role % does not exist and % may not create it; grants to it are skipped', p_role, current_user
            USING HINT = format('As an administrator: CREATE ROLE %I NOLOGIN; then SELECT musterd.grant_roles();', p_role);
        RETURN false;
END $$;
COMMENT ON FUNCTION musterd.make_role(name) IS 'Internal: creates a role if it is missing and may be created; whether it exists now.';

CREATE FUNCTION musterd.grant_functions(p_role name, p_names text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_routine regprocedure;
BEGIN
    FOR v_routine IN
        SELECT p.oid FROM pg_proc p
         WHERE p.pronamespace = 'musterd'::regnamespace AND p.prokind = 'f'
           -- Functions that only compute are what the views are made of.
           AND (p.proname = ANY (p_names) OR p.provolatile = 'i')
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', v_routine, p_role);
    END LOOP;
END $$;
COMMENT ON FUNCTION musterd.grant_functions(name, text[]) IS
    'Internal: lets a role call the functions of these names, and all that only compute.';

CREATE FUNCTION musterd.grant_reading(p_role name) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_table record;
BEGIN
    -- A token lets its holder write an outcome, and a lock_key lets a session pass for a worker: those are the workers' own.
    FOR v_table IN
        SELECT c.oid::regclass AS name, bool_or(a.attname IN ('token', 'lock_key')) AS has_secrets,
               string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) FILTER (WHERE a.attname NOT IN ('token', 'lock_key')) AS columns
          FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
         WHERE c.relnamespace = 'musterd'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm')
         GROUP BY c.oid
    LOOP
        EXECUTE format('REVOKE ALL ON %s FROM %I', v_table.name, p_role);
        EXECUTE format('GRANT SELECT %s ON %s TO %I', CASE WHEN v_table.has_secrets THEN '(' || v_table.columns || ')' END, v_table.name, p_role);
    END LOOP;
    PERFORM musterd.grant_functions(p_role, ARRAY[
        'caller', 'acts_as', 'steers_all', 'may_see', 'audit', 'batch_errors', 'batch_has_work_now', 'batch_redrives', 'batch_row', 'batch_rows', 'begun_parent', 'children_by_state', 'chunks_of', 'data_is_gone', 'errors', 'failed_now', 'focus',
        'has_failed_siblings', 'has_pending_children', 'has_work_now', 'is_about_to_end', 'prune_plan', 'redrive_preview', 'retention_of', 'rows_priority', 'shortest_retention', 'task_at']);
END $$;
COMMENT ON FUNCTION musterd.grant_reading(name) IS 'Internal: lets a role read everything but tokens and lock_keys.';

CREATE FUNCTION musterd.grant_roles() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_table regclass;
BEGIN
    REVOKE ALL ON SCHEMA musterd FROM PUBLIC;
    REVOKE ALL ON ALL TABLES IN SCHEMA musterd FROM PUBLIC;
    REVOKE ALL ON ALL SEQUENCES IN SCHEMA musterd FROM PUBLIC;
    REVOKE ALL ON ALL ROUTINES IN SCHEMA musterd FROM PUBLIC;

    IF musterd.make_role('musterd_observer') THEN
        GRANT USAGE ON SCHEMA musterd TO musterd_observer;
        PERFORM musterd.grant_reading('musterd_observer');
    END IF;
    IF musterd.make_role('musterd_operator') THEN
        GRANT USAGE ON SCHEMA musterd TO musterd_operator;
        PERFORM musterd.grant_reading('musterd_operator');
        PERFORM musterd.grant_functions('musterd_operator', ARRAY[
            'hold', 'release', 'abort', 'canary', 'redrive', 'hold_data', 'release_data', 'retry_task', 'pause_queue', 'resume_queue']);
    END IF;
    IF musterd.make_role('musterd_producer') THEN
        GRANT USAGE ON SCHEMA musterd TO musterd_producer;
        GRANT SELECT ON musterd.my_tasks, musterd.my_batches, musterd.paused_queues TO musterd_producer;
        -- Only what describes a task. No parent_id: spawn is the way. No state: the trigger decides it. The id is for RETURNING.
        GRANT INSERT (command, payload, queue, priority, run_at, max_attempts, timeout, dedup_key, idempotency_key,
                      on_child_failure, traceparent), SELECT (id) ON musterd.tasks TO musterd_producer;
        -- Not register_command: a registered procedure is what workers run. What it did not submit is refused by the functions.
        PERFORM musterd.grant_functions('musterd_producer', ARRAY[
            'caller', 'enqueue', 'enqueue_many', 'enqueue_after', 'spawn', 'submit_batch', 'append_rows', 'canary', 'hold', 'release', 'abort',
            'redrive', 'hold_data', 'release_data', 'redrive_preview', 'set_result', 'batch_errors', 'batch_redrives', 'batch_row', 'batch_rows', 'errors', 'has_pending_children', 'has_failed_siblings']);
    END IF;
    IF musterd.make_role('musterd_worker') THEN
        GRANT USAGE ON SCHEMA musterd TO musterd_worker;
        GRANT SELECT ON ALL TABLES IN SCHEMA musterd TO musterd_worker;
        FOR v_table IN
            SELECT c.oid FROM pg_class c
             WHERE c.relnamespace = 'musterd'::regnamespace AND c.relkind IN ('r', 'p')
               -- What migrations write, and events, which functions write, a worker only reads.
               AND c.relname NOT IN ('schema_history', 'schema_compat', 'events')
        LOOP
            EXECUTE format('GRANT INSERT, UPDATE, DELETE ON %s TO musterd_worker', v_table);
        END LOOP;
        GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA musterd TO musterd_worker;
        GRANT EXECUTE ON ALL ROUTINES IN SCHEMA musterd TO musterd_worker;
        REVOKE EXECUTE ON FUNCTION musterd.grant_roles(), musterd.make_role(name), musterd.grant_functions(name, text[]),
            musterd.grant_reading(name) FROM musterd_worker;
    END IF;
END $$;
COMMENT ON FUNCTION musterd.grant_roles() IS
    'Makes musterd_worker, musterd_operator, musterd_producer and musterd_observer where it may, takes everything from PUBLIC and '
    'grants each its rights. Run by `musterd migrate`; run it again after an administrator made a missing role.';

-- Least privilege: three roles without login, to be granted to the users that need them.
--
-- Rule of this file: producers reach the tables through SECURITY DEFINER functions; only workers write tables; observers
-- read. Nobody else has anything. A database owner without CREATEROLE gets a notice, not a failed migration: the roles can
-- be made by an administrator and musterd.grant_roles() called then.

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

CREATE FUNCTION musterd.grant_roles() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_routine regprocedure;
BEGIN
    REVOKE ALL ON SCHEMA musterd FROM PUBLIC;
    REVOKE ALL ON ALL TABLES IN SCHEMA musterd FROM PUBLIC;
    REVOKE ALL ON ALL SEQUENCES IN SCHEMA musterd FROM PUBLIC;
    REVOKE ALL ON ALL ROUTINES IN SCHEMA musterd FROM PUBLIC;

    IF musterd.make_role('musterd_observer') THEN
        GRANT USAGE ON SCHEMA musterd TO musterd_observer;
        GRANT SELECT ON ALL TABLES IN SCHEMA musterd TO musterd_observer;
        GRANT EXECUTE ON FUNCTION musterd.has_pending_children, musterd.has_failed_siblings TO musterd_observer;
    END IF;
    IF musterd.make_role('musterd_producer') THEN
        GRANT USAGE ON SCHEMA musterd TO musterd_producer;
        GRANT SELECT ON ALL TABLES IN SCHEMA musterd TO musterd_producer;
        -- Only what describes a task. No parent_id: spawn is the way. No state: the trigger decides it.
        GRANT INSERT (command, payload, queue, priority, run_at, max_attempts, timeout, dedup_key, idempotency_key,
                      on_child_failure, traceparent) ON musterd.tasks TO musterd_producer;
        -- Not register_command: whoever registers a procedure chooses what workers run.
        FOR v_routine IN
            SELECT p.oid FROM pg_proc p
             WHERE p.pronamespace = 'musterd'::regnamespace
               AND p.proname IN ('enqueue', 'enqueue_after', 'spawn', 'submit_batch', 'append_rows', 'hold', 'release',
                                 'abort', 'redrive', 'has_pending_children', 'has_failed_siblings')
        LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO musterd_producer', v_routine);
        END LOOP;
    END IF;
    IF musterd.make_role('musterd_worker') THEN
        GRANT USAGE ON SCHEMA musterd TO musterd_worker;
        GRANT SELECT ON ALL TABLES IN SCHEMA musterd TO musterd_worker;  -- the migration history too, which it only reads
        GRANT INSERT, UPDATE, DELETE ON musterd.tasks, musterd.task_waits, musterd.batches, musterd.rows, musterd.results,
            musterd.blocks, musterd.tallies, musterd.workers, musterd.queues, musterd.commands, musterd.rate_limits TO musterd_worker;
        GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA musterd TO musterd_worker;
        GRANT EXECUTE ON ALL ROUTINES IN SCHEMA musterd TO musterd_worker;
        REVOKE EXECUTE ON FUNCTION musterd.grant_roles(), musterd.make_role(name) FROM musterd_worker;
    END IF;
END $$;
COMMENT ON FUNCTION musterd.grant_roles() IS
    'Makes musterd_worker, musterd_producer and musterd_observer where it may, takes everything from PUBLIC and grants each '
    'its rights. Run by the migration; run it again after an administrator made a missing role.';

DO $$ BEGIN PERFORM musterd.grant_roles(); END $$;

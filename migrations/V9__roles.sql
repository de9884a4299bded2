-- Least privilege: three roles without login, to be granted to the users that need them.
--
-- Rule of this file: producers reach the tables through SECURITY DEFINER functions; only workers write tables; observers
-- read. Everyone else has nothing. A database owner without CREATEROLE gets a notice, not a failed migration: the roles can
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
           -- Functions that only look, among them those that the views are made of, are for everyone who may read.
           AND (p.proname = ANY (p_names) OR p.provolatile <> 'v')
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', v_routine, p_role);
    END LOOP;
END $$;
COMMENT ON FUNCTION musterd.grant_functions(name, text[]) IS
    'Internal: lets a role call the functions of these names, and all that only look.';

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
        GRANT SELECT ON ALL TABLES IN SCHEMA musterd TO musterd_observer;
        PERFORM musterd.grant_functions('musterd_observer', ARRAY['has_pending_children', 'has_failed_siblings']);
    END IF;
    IF musterd.make_role('musterd_producer') THEN
        GRANT USAGE ON SCHEMA musterd TO musterd_producer;
        GRANT SELECT ON ALL TABLES IN SCHEMA musterd TO musterd_producer;
        -- Only what describes a task. No parent_id: spawn is the way. No state: the trigger decides it.
        GRANT INSERT (command, payload, queue, priority, run_at, max_attempts, timeout, dedup_key, idempotency_key,
                      on_child_failure, traceparent) ON musterd.tasks TO musterd_producer;
        -- Not register_command: a registered procedure is what workers run.
        PERFORM musterd.grant_functions('musterd_producer', ARRAY[
            'enqueue', 'enqueue_after', 'spawn', 'submit_batch', 'append_rows', 'hold', 'release', 'abort', 'redrive',
            'has_pending_children', 'has_failed_siblings']);
    END IF;
    IF musterd.make_role('musterd_worker') THEN
        GRANT USAGE ON SCHEMA musterd TO musterd_worker;
        GRANT SELECT ON ALL TABLES IN SCHEMA musterd TO musterd_worker;
        FOR v_table IN
            SELECT c.oid FROM pg_class c
             WHERE c.relnamespace = 'musterd'::regnamespace AND c.relkind IN ('r', 'p')
               -- What migrations write, a worker only reads.
               AND c.relname NOT IN ('schema_history', 'schema_compat')
        LOOP
            EXECUTE format('GRANT INSERT, UPDATE, DELETE ON %s TO musterd_worker', v_table);
        END LOOP;
        GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA musterd TO musterd_worker;
        GRANT EXECUTE ON ALL ROUTINES IN SCHEMA musterd TO musterd_worker;
        REVOKE EXECUTE ON FUNCTION musterd.grant_roles(), musterd.make_role(name), musterd.grant_functions(name, text[]) FROM musterd_worker;
    END IF;
END $$;
COMMENT ON FUNCTION musterd.grant_roles() IS
    'Makes musterd_worker, musterd_producer and musterd_observer where it may, takes everything from PUBLIC and grants each '
    'its rights. Run by `musterd migrate`; run it again after an administrator made a missing role.';

-- Statistical units are derived from enterprises: a parent plans, three children refresh a part each, side by side, and
-- two uncles run when all of it is over. ANALYZE is one of them: it locks its table against another ANALYZE, so the
-- children leave it out.

CREATE SCHEMA stat;
CREATE TABLE stat.enterprise (id int PRIMARY KEY, region text NOT NULL, employees int NOT NULL);
CREATE TABLE stat.statistical_unit (enterprise_id int PRIMARY KEY, region text NOT NULL, size_class text NOT NULL);
CREATE TABLE stat.report (region text PRIMARY KEY, units int NOT NULL);
INSERT INTO stat.enterprise
SELECT n, (ARRAY['north', 'south', 'west'])[n % 3 + 1], n * 7 % 300 FROM generate_series(1, 90) n;

CREATE PROCEDURE stat.derive_statistical_unit(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM musterd.spawn(
                p_command => 'statistical_unit_refresh_batch',
                p_payload => jsonb_build_object('batch_seq', part, 'enterprise_ids', jsonb_agg(id ORDER BY id)),
                p_parent_id => p_task_id,
                p_priority => 20)
       FROM (SELECT e.id, ntile(3) OVER (ORDER BY e.id) AS part FROM stat.enterprise e) e
      GROUP BY part;
    PERFORM musterd.enqueue_after('analyze_tables', '{}', ARRAY[p_task_id], dedup_key => 'analyze_tables');
    PERFORM musterd.enqueue_after('derive_reports', '{}', ARRAY[p_task_id], dedup_key => 'derive_reports');
END $$;

CREATE PROCEDURE stat.statistical_unit_refresh_batch(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
DECLARE
    v_ids int[] := ARRAY (SELECT jsonb_array_elements_text(p_payload -> 'enterprise_ids')::int);
BEGIN
    DELETE FROM stat.statistical_unit u WHERE u.enterprise_id = ANY (v_ids);
    INSERT INTO stat.statistical_unit
    SELECT e.id, e.region, CASE WHEN e.employees < 50 THEN 'small' WHEN e.employees < 250 THEN 'medium' ELSE 'large' END
      FROM stat.enterprise e WHERE e.id = ANY (v_ids);
END $$;

CREATE PROCEDURE stat.analyze_tables(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
BEGIN
    ANALYZE stat.statistical_unit;
END $$;

CREATE PROCEDURE stat.derive_reports(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM stat.report;
    INSERT INTO stat.report SELECT u.region, count(*) FROM stat.statistical_unit u GROUP BY u.region;
END $$;

-- For process_tasks; workers do it by themselves, from their configuration.
SELECT musterd.register_command(name, 'analytics', 'sql', 'stat.' || name)
  FROM unnest(ARRAY['derive_statistical_unit', 'statistical_unit_refresh_batch', 'analyze_tables', 'derive_reports']) name;

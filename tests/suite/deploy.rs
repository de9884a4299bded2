//! What is under deploy/ holds together, without a cluster: it renders, every field is one that Kubernetes knows, and what
//! it promises agrees with the program.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::suite::support::config;
use crate::suite::support::manifests::{
    at, has, of_kind, overlays, paths, python, render, root, run_it, yaml, yaml_file,
};
use crate::suite::support::run;

/// The oldest and the newest Kubernetes whose fields are asked for.
const KUBERNETES: [&str; 2] = ["1.27", "1.34"];

fn tools() -> bool {
    has("kubectl") && has("deploy-tools")
}

#[test]
fn every_overlay_renders_and_has_no_field_that_kubernetes_does_not_know() {
    if !tools() {
        return;
    }
    for overlay in overlays() {
        let (file, documents) = render(&overlay);
        let known = documents.iter().filter(|document| !is_custom(document)).count();
        for version in KUBERNETES {
            let file = file.to_str().unwrap();
            let said = run_it(&mut python(&["-m", "kubernetes_validate", "--strict", "-k", version, file]));
            let passed = String::from_utf8_lossy(&said.stdout).matches(" passed ").count()
                + String::from_utf8_lossy(&said.stderr).matches(" passed ").count();
            assert_eq!(passed, known, "{overlay} for {version}");
        }
        for custom in documents.iter().filter(|document| is_custom(document)) {
            let mut used = BTreeSet::new();
            paths(&custom["spec"], "", &mut used);
            let fields = fields_of(custom["kind"].as_str().unwrap());
            let unknown: Vec<_> = used.iter().filter(|path| !fields.contains(&path.as_str())).collect();
            assert!(unknown.is_empty(), "{overlay}: {}: {unknown:?}", custom["kind"]);
        }
    }
}

fn is_custom(document: &Value) -> bool {
    let group = document["apiVersion"].as_str().unwrap();
    group.starts_with("keda.sh/") || group.starts_with("monitoring.coreos.com/")
}

/// The fields of the operators' kinds that we use, as their definitions (KEDA 2, Prometheus operator v1) have them: what is
/// not here is a typing error, or has to be looked up first.
fn fields_of(kind: &str) -> Vec<&'static str> {
    let fields = match kind {
        "PodMonitor" => {
            "selector selector.matchLabels selector.matchLabels.app.kubernetes.io/name \
             selector.matchLabels.app.kubernetes.io/component podMetricsEndpoints podMetricsEndpoints.port \
             podMetricsEndpoints.path podMetricsEndpoints.interval podMetricsEndpoints.scrapeTimeout"
        }
        "PrometheusRule" => {
            "groups groups.name groups.rules groups.rules.alert groups.rules.expr groups.rules.for groups.rules.labels \
             groups.rules.labels.severity groups.rules.annotations groups.rules.annotations.summary \
             groups.rules.annotations.description"
        }
        "ScaledObject" => {
            "scaleTargetRef scaleTargetRef.name minReplicaCount maxReplicaCount pollingInterval cooldownPeriod fallback \
             fallback.failureThreshold fallback.replicas advanced advanced.horizontalPodAutoscalerConfig \
             advanced.horizontalPodAutoscalerConfig.behavior advanced.horizontalPodAutoscalerConfig.behavior.scaleUp \
             advanced.horizontalPodAutoscalerConfig.behavior.scaleUp.stabilizationWindowSeconds \
             advanced.horizontalPodAutoscalerConfig.behavior.scaleUp.policies \
             advanced.horizontalPodAutoscalerConfig.behavior.scaleUp.policies.type \
             advanced.horizontalPodAutoscalerConfig.behavior.scaleUp.policies.value \
             advanced.horizontalPodAutoscalerConfig.behavior.scaleUp.policies.periodSeconds \
             advanced.horizontalPodAutoscalerConfig.behavior.scaleDown \
             advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.stabilizationWindowSeconds \
             advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.policies \
             advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.policies.type \
             advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.policies.value \
             advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.policies.periodSeconds triggers triggers.type \
             triggers.name triggers.metricType triggers.metadata triggers.metadata.serverAddress triggers.metadata.query \
             triggers.metadata.threshold triggers.metadata.ignoreNullValues"
        }
        other => panic!("{other} is of an operator nobody has looked at"),
    };
    fields.split_whitespace().collect()
}

/// A field that is none is found: else the test above would prove nothing.
#[test]
fn a_field_that_is_none_is_refused() {
    if !tools() {
        return;
    }
    let (file, _) = render("deploy/base");
    let text = std::fs::read_to_string(&file).unwrap().replace("minReadySeconds", "minReadySecond");
    std::fs::write(&file, text).unwrap();
    let said =
        python(&["-m", "kubernetes_validate", "--strict", "-k", KUBERNETES[1], file.to_str().unwrap()])
            .output();
    assert!(!said.unwrap().status.success());
}

/// What every pod of ours promises, whatever the overlay changes.
#[test]
fn every_pod_is_as_small_as_it_can_be() {
    if !tools() {
        return;
    }
    for overlay in overlays() {
        let (_, documents) = render(&overlay);
        for workload in of_kind(&documents, "Deployment").into_iter().chain(of_kind(&documents, "Job")) {
            let pod = at(workload, "/spec/template/spec");
            let name = format!("{overlay}: {}", workload["metadata"]["name"]);
            assert_eq!(pod["automountServiceAccountToken"], false, "{name}");
            assert_eq!(at(pod, "/securityContext/runAsNonRoot"), true, "{name}");
            assert!(at(pod, "/securityContext/runAsUser").as_u64().unwrap() > 0, "{name}");
            assert_eq!(at(pod, "/securityContext/seccompProfile/type"), "RuntimeDefault", "{name}");
            let containers =
                ["containers", "initContainers"].iter().filter_map(|list| pod[list].as_array()).flatten();
            for container in containers {
                assert_eq!(at(container, "/securityContext/readOnlyRootFilesystem"), true, "{name}");
                assert_eq!(at(container, "/securityContext/allowPrivilegeEscalation"), false, "{name}");
                assert_eq!(at(container, "/securityContext/capabilities/drop/0"), "ALL", "{name}");
                assert!(at(container, "/resources/limits/memory").is_string(), "{name}");
                for variable in container["env"].as_array().into_iter().flatten() {
                    let secret = variable["name"].as_str().unwrap().to_lowercase();
                    let is_secret = ["url", "key", "password"].iter().any(|word| secret.contains(word));
                    assert!(!is_secret || secret.ends_with("_file"), "{name}: {secret} is not a file");
                }
            }
        }
        for kind in ["NetworkPolicy", "PodDisruptionBudget", "ServiceAccount", "Job"] {
            assert!(!of_kind(&documents, kind).is_empty(), "{overlay} has no {kind}");
        }
    }
}

/// The TOML of every overlay, with the environment its containers get: the program accepts it, and stops in time.
#[tokio::test(flavor = "multi_thread")]
async fn every_config_is_accepted_and_the_pod_outlives_its_grace() {
    if !tools() {
        return;
    }
    for overlay in overlays() {
        let (_, documents) = render(&overlay);
        let map =
            of_kind(&documents, "ConfigMap").into_iter().find(|map| map["data"]["musterd.toml"].is_string());
        let toml = map.unwrap()["data"]["musterd.toml"].as_str().unwrap();
        let dir = run::new_dir("config");
        std::fs::write(dir.join("musterd.toml"), toml).unwrap();
        for workload in of_kind(&documents, "Deployment").into_iter().chain(of_kind(&documents, "Job")) {
            if workload["metadata"]["name"].as_str() == Some("postgres") {
                continue;
            }
            let pod = at(workload, "/spec/template/spec");
            let containers =
                ["containers", "initContainers"].iter().filter_map(|list| pod[list].as_array()).flatten();
            for container in containers {
                accepted(&dir, container).await;
            }
            if workload["kind"] == "Deployment" {
                let period = at(pod, "/terminationGracePeriodSeconds").as_u64().unwrap();
                let config: toml::Table = toml.parse().unwrap();
                let grace = humantime::parse_duration(config["shutdown"]["grace"].as_str().unwrap()).unwrap();
                assert!(
                    Duration::from_secs(period) >= grace + Duration::from_secs(10),
                    "{overlay}: {period} s"
                );
            }
        }
    }
}

/// `musterd config check` with the container's environment; what a secret's file would hold is put into a file.
async fn accepted(dir: &Path, container: &Value) {
    let file = dir.join("musterd.toml");
    let mut command = config::command(dir, &["config", "check", "--config", file.to_str().unwrap()]);
    for variable in container["env"].as_array().into_iter().flatten() {
        let (name, value) = (variable["name"].as_str().unwrap(), variable["value"].as_str().unwrap());
        match name.ends_with("_FILE") {
            true => {
                let secret = dir.join(name);
                let url = if name.contains("REDIS") { "redis://redis" } else { "postgres://db/x" };
                std::fs::write(&secret, if name.contains("URL") { url } else { "key" }).unwrap();
                command.env(name, secret);
            }
            false => drop(command.env(name, value)),
        }
    }
    let output = config::finish(command).await;
    assert!(output.status.success(), "{output:?}");
    let args: Vec<&str> = container["args"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(args.contains(&"/etc/musterd/musterd.toml"), "{args:?}");
    let mut help: Vec<&str> = args[..1].to_vec();
    help.push("--help");
    let known = config::stdout(&config::musterd(&help).await);
    for option in args.iter().filter(|arg| arg.starts_with("--")) {
        assert!(known.contains(option), "{option} of {args:?}");
    }
}

/// Names of metrics in a text.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(|c| !word(c)).filter(|name| name.starts_with("musterd_")).map(str::to_owned).collect()
}

/// docs/metrics.md is compared with a real scrape elsewhere; rules, dashboard and autoscalers are compared with it here.
#[test]
fn every_metric_that_is_asked_for_exists() {
    let page = std::fs::read_to_string(root().join("docs/metrics.md")).unwrap();
    let told: BTreeSet<String> = metrics_in(&page);
    let mut asked = BTreeSet::new();
    for file in [
        "monitoring/prometheusrule.yaml",
        "monitoring/musterd.json",
        "monitoring/rules_test.yaml",
        "keda/scaledobject.yaml",
        "hpa/horizontalpodautoscaler.yaml",
        "hpa/adapter.yaml",
    ] {
        let found = metrics_in(&std::fs::read_to_string(root().join("deploy").join(file)).unwrap());
        assert!(!found.is_empty(), "{file} asks for nothing");
        asked.extend(found);
    }
    let series = |name: &str| {
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        told.contains(name) || base.is_some_and(|base| told.contains(base))
    };
    let unknown: Vec<_> = asked.iter().filter(|name| !series(name)).collect();
    assert!(unknown.is_empty(), "not in docs/metrics.md: {unknown:?}");
}

#[test]
fn every_alert_fires_when_it_should_and_the_dashboard_asks_in_promql() {
    if !(has("deploy-tools") && has("promtool")) {
        return;
    }
    let rule = yaml_file("deploy/monitoring/prometheusrule.yaml");
    let dir = run::new_dir("rules");
    std::fs::write(dir.join("rules.yaml"), rule["spec"].to_string()).unwrap();
    std::fs::copy(root().join("deploy/monitoring/rules_test.yaml"), dir.join("rules_test.yaml")).unwrap();
    run_it(Command::new("promtool").args(["check", "rules", "rules.yaml"]).current_dir(&dir));
    run_it(Command::new("promtool").args(["test", "rules", "rules_test.yaml"]).current_dir(&dir));
    let names: Vec<&str> = at(&rule, "/spec/groups/0/rules")
        .as_array()
        .unwrap()
        .iter()
        .map(|rule| rule["alert"].as_str().unwrap())
        .collect();
    let tested = std::fs::read_to_string(dir.join("rules_test.yaml")).unwrap();
    for name in names {
        assert!(tested.contains(&format!("alertname: {name}")), "{name} has no test");
    }

    // The dashboard's questions as rules: promtool reads them as Prometheus would, with Grafana's variables filled in.
    let text = std::fs::read_to_string(root().join("deploy/monitoring/musterd.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let questions: Vec<Value> = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().unwrap())
        .map(|target| {
            target["expr"].as_str().unwrap().replace("$__rate_interval", "5m").replace("$namespace", ".*")
        })
        .chain(autoscaler_queries())
        .enumerate()
        .map(|(at, expr)| serde_json::json!({ "record": format!("q:{at}"), "expr": expr }))
        .collect();
    assert!(questions.len() > 15);
    let rules = serde_json::json!({ "groups": [{ "name": "dashboard", "rules": questions }] });
    std::fs::write(dir.join("dashboard.yaml"), rules.to_string()).unwrap();
    run_it(Command::new("promtool").args(["check", "rules", "dashboard.yaml"]).current_dir(&dir));
}

fn autoscaler_queries() -> Vec<String> {
    let object = yaml_file("deploy/keda/scaledobject.yaml");
    let triggers = at(&object, "/spec/triggers").as_array().unwrap();
    triggers.iter().map(|trigger| trigger["metadata"]["query"].as_str().unwrap().to_owned()).collect()
}

/// compose.yaml: the environment is one that the program accepts, and it has longer to stop than it asks for.
#[tokio::test(flavor = "multi_thread")]
async fn the_compose_file_starts_what_it_says() {
    if !has("deploy-tools") {
        return;
    }
    let compose = yaml_file("compose.yaml");
    let services = compose["services"].as_object().unwrap();
    for name in ["musterd", "migrate", "postgres", "redis", "minio"] {
        assert!(services.contains_key(name), "{name}");
    }
    let ours = &services["musterd"];
    let dir = run::new_dir("compose");
    let mut command = config::command(&dir, &["config", "check"]);
    for (name, value) in ours["environment"].as_object().unwrap() {
        command.env(name, value.as_str().unwrap());
    }
    let checked = config::finish(command).await;
    assert!(checked.status.success(), "{checked:?}");
    let seconds = |text: &Value| humantime::parse_duration(text.as_str().unwrap()).unwrap();
    assert!(seconds(&ours["stop_grace_period"]) > seconds(&ours["environment"]["MUSTERD__SHUTDOWN__GRACE"]));
    for (name, service) in services {
        for needed in service["depends_on"].as_object().into_iter().flat_map(|map| map.keys()) {
            assert!(services.contains_key(needed), "{name} waits for {needed}");
        }
    }
    assert_eq!(yaml(b"a: 1\n---\nb: 2\n").len(), 2);
}

#[test]
fn the_dockerfile_has_no_fault() {
    if !has("deploy-tools") {
        return;
    }
    let hadolint = root().join("target/deploy-tools/python/bin/hadolint");
    run_it(Command::new(hadolint).args(["--failure-threshold", "info"]).arg(root().join("Dockerfile")));
    let text = std::fs::read_to_string(root().join("Dockerfile")).unwrap();
    for line in ["USER 65532:65532", "STOPSIGNAL SIGTERM", "ENTRYPOINT [\"/musterd\"]", "FROM scratch"] {
        assert!(text.lines().any(|found| found == line), "no line {line}");
    }
}

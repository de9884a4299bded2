//! What the objects under deploy/ say of each other and of the program: names, ports, paths and selectors meet.

use serde_json::Value;

use crate::suite::support::manifests::{at, has, of_kind, overlays, render, root, yaml_file};

/// One rendered overlay, and in it the pods of the workers.
struct Site {
    overlay: String,
    documents: Vec<Value>,
}

impl Site {
    fn all() -> Vec<Self> {
        if !(has("kubectl") && has("deploy-tools")) {
            return Vec::new();
        }
        let site = |overlay: String| Self { documents: render(&overlay).1, overlay };
        overlays().into_iter().map(site).collect()
    }

    fn deployment(&self) -> &Value {
        let deployments = of_kind(&self.documents, "Deployment");
        deployments.into_iter().find(|found| found["metadata"]["name"] == "musterd").unwrap()
    }

    fn pod(&self) -> &Value {
        at(self.deployment(), "/spec/template/spec")
    }

    fn worker(&self) -> &Value {
        at(self.pod(), "/containers/0")
    }

    fn toml(&self) -> toml::Table {
        let maps = of_kind(&self.documents, "ConfigMap");
        let toml = maps.iter().find_map(|map| map["data"]["musterd.toml"].as_str());
        toml.unwrap().parse().unwrap()
    }

    /// Whether a selector's labels are all on the workers' pods.
    #[track_caller]
    fn selects_the_workers(&self, selector: &Value) {
        let labels = at(self.deployment(), "/spec/template/metadata/labels");
        let wanted = at(selector, "/matchLabels").as_object().unwrap();
        assert!(!wanted.is_empty(), "{}: a selector of everything", self.overlay);
        for (name, value) in wanted {
            assert_eq!(&labels[name], value, "{}: no pod has this {name}", self.overlay);
        }
    }

    fn has_object(&self, kind: &str, name: &Value) -> bool {
        of_kind(&self.documents, kind).iter().any(|found| &found["metadata"]["name"] == name)
    }
}

fn list<'a>(value: &'a Value, pointer: &str) -> &'a Vec<Value> {
    at(value, pointer).as_array().unwrap_or_else(|| panic!("{pointer} is no list"))
}

#[test]
fn every_selector_finds_the_workers_and_every_autoscaler_their_deployment() {
    for site in Site::all() {
        site.selects_the_workers(at(site.deployment(), "/spec/selector"));
        for (kind, pointer) in [
            ("PodDisruptionBudget", "/spec/selector"),
            ("NetworkPolicy", "/spec/podSelector"),
            ("PodMonitor", "/spec/selector"),
        ] {
            for object in of_kind(&site.documents, kind) {
                site.selects_the_workers(at(object, pointer));
            }
        }
        let spread = list(site.pod(), "/topologySpreadConstraints");
        let over: Vec<&Value> = spread.iter().map(|constraint| &constraint["topologyKey"]).collect();
        assert_eq!(over, ["topology.kubernetes.io/zone", "kubernetes.io/hostname"], "{}", site.overlay);
        spread.iter().for_each(|constraint| site.selects_the_workers(at(constraint, "/labelSelector")));
        let scalers =
            ["HorizontalPodAutoscaler", "ScaledObject"].map(|kind| of_kind(&site.documents, kind)).concat();
        for scaler in &scalers {
            assert_eq!(at(scaler, "/spec/scaleTargetRef/name"), "musterd", "{}", site.overlay);
        }
        // Two who set the number of replicas would take turns.
        let is_scaled = !scalers.is_empty();
        assert_eq!(is_scaled, site.deployment()["spec"]["replicas"].is_null(), "{}", site.overlay);
        assert_eq!(is_scaled, site.overlay.contains("production"), "{}", site.overlay);
    }
}

#[test]
fn probes_ask_what_the_program_answers_on_the_port_it_listens_on() {
    for site in Site::all() {
        let worker = site.worker();
        for (probe, path) in
            [("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")]
        {
            assert_eq!(at(worker, &format!("/{probe}/httpGet/path")), path, "{}: {probe}", site.overlay);
            assert_eq!(at(worker, &format!("/{probe}/httpGet/port")), "http", "{}: {probe}", site.overlay);
        }
        assert_eq!(at(worker, "/ports/0/name"), "http");
        let listen = site.toml()["http"]["listen"].as_str().unwrap().to_owned();
        assert_eq!(listen, format!("0.0.0.0:{}", at(worker, "/ports/0/containerPort")), "{}", site.overlay);
        for monitor in of_kind(&site.documents, "PodMonitor") {
            assert_eq!(at(monitor, "/spec/podMetricsEndpoints/0/port"), "http");
            assert_eq!(at(monitor, "/spec/podMetricsEndpoints/0/path"), "/metrics");
        }
        for policy in of_kind(&site.documents, "NetworkPolicy") {
            assert_eq!(at(policy, "/spec/policyTypes"), &serde_json::json!(["Ingress", "Egress"]));
            for rule in list(policy, "/spec/ingress") {
                assert!(rule["from"].is_array(), "{}: everybody may come in", site.overlay);
                assert_eq!(at(rule, "/ports/0/port"), "http", "{}", site.overlay);
            }
            goes_out_as_far_as_it_must(&site.overlay, list(policy, "/spec/egress"));
        }
    }
}

/// To what it is configured for, and never to the metadata service of a cloud.
fn goes_out_as_far_as_it_must(overlay: &str, rules: &[Value]) {
    if overlay.contains("development") {
        return assert_eq!(rules, [serde_json::json!({})]);
    }
    let mut reached = Vec::new();
    for rule in rules {
        let ports: Vec<u64> =
            list(rule, "/ports").iter().map(|port| port["port"].as_u64().unwrap()).collect();
        if ports != [53, 53] {
            let except = list(rule, "/to/0/ipBlock/except");
            assert!(except.contains(&"169.254.0.0/16".into()), "{overlay}: {ports:?}");
            reached.extend(ports);
        }
    }
    let expected: &[u64] =
        if overlay.contains("production") { &[5432, 6432, 6379, 26379, 443] } else { &[5432, 6432] };
    assert_eq!(reached, expected, "{overlay}");
}

/// The work of another namespace is no reason for replicas in this one, and who is busy is not sent away in a hurry.
#[test]
fn autoscalers_ask_for_their_own_work_and_take_their_time_to_scale_down() {
    for site in Site::all() {
        for object in of_kind(&site.documents, "ScaledObject") {
            let mine = format!("namespace={}", at(object, "/metadata/namespace"));
            for trigger in list(object, "/spec/triggers") {
                let query = at(trigger, "/metadata/query").as_str().unwrap();
                assert!(query.contains(&mine), "{}: {query}", site.overlay);
            }
            slowly_down(at(object, "/spec/advanced/horizontalPodAutoscalerConfig/behavior/scaleDown"));
        }
        for scaler in of_kind(&site.documents, "HorizontalPodAutoscaler") {
            let rules = yaml_file("deploy/hpa/adapter.yaml");
            for metric in list(scaler, "/spec/metrics") {
                let name = at(metric, "/external/metric/name").as_str().unwrap();
                let served = |rule: &Value| {
                    let (series, query) = (rule["seriesQuery"].as_str(), rule["metricsQuery"].as_str());
                    series.unwrap().starts_with(&format!("{name}{{"))
                        && query.unwrap().contains(&format!("{name}{{<<.LabelMatchers>>"))
                };
                assert!(list(&rules, "/externalRules").iter().any(served), "no rule serves {name}");
            }
            slowly_down(at(scaler, "/spec/behavior/scaleDown"));
        }
    }
}

#[track_caller]
fn slowly_down(behavior: &Value) {
    assert!(at(behavior, "/stabilizationWindowSeconds").as_u64().unwrap() >= 300);
    let policy = at(behavior, "/policies/0");
    assert_eq!((&policy["type"], &policy["value"]), (&"Pods".into(), &1.into()));
}

/// What is mounted exists, and what the environment names is mounted.
#[test]
fn every_file_that_is_named_is_mounted() {
    let page = std::fs::read_to_string(root().join("docs/deployment.md")).unwrap();
    for site in Site::all() {
        let workloads = ["Deployment", "Job"].map(|kind| of_kind(&site.documents, kind)).concat();
        for workload in workloads {
            let pod = at(workload, "/spec/template/spec");
            let what = format!("{}: {}", site.overlay, workload["metadata"]["name"]);
            for volume in list(pod, "/volumes") {
                let map = &volume["configMap"]["name"];
                assert!(map.is_null() || site.has_object("ConfigMap", map), "{what}: no {map}");
                // The operator's own, by the name that the manual gives; or the overlay's.
                if let Some(secret) = volume["secret"]["secretName"].as_str() {
                    let is_told = page.contains(&format!("| `{secret}` |"));
                    assert!(is_told || site.has_object("Secret", &secret.into()), "{what}: {secret}");
                }
            }
            if let Some(account) = pod.get("serviceAccountName") {
                let accounts = of_kind(&site.documents, "ServiceAccount");
                let account = accounts.iter().find(|found| &found["metadata"]["name"] == account).unwrap();
                assert_eq!(account["automountServiceAccountToken"], false, "{what}");
            }
            for list in ["containers", "initContainers"] {
                pod[list].as_array().into_iter().flatten().for_each(|one| is_mounted(pod, one, &what));
            }
        }
    }
}

fn is_mounted(pod: &Value, container: &Value, what: &str) {
    let mounts = list(container, "/volumeMounts");
    for mount in mounts {
        let volume = list(pod, "/volumes").iter().any(|volume| volume["name"] == mount["name"]);
        assert!(volume, "{what}: no volume {}", mount["name"]);
    }
    let is_below = |file: &str| {
        mounts.iter().any(|mount| file.starts_with(&format!("{}/", mount["mountPath"].as_str().unwrap())))
    };
    let variables = container["env"].as_array().into_iter().flatten();
    let files = variables
        .filter(|variable| variable["name"].as_str().unwrap().ends_with("_FILE"))
        .map(|variable| variable["value"].as_str().unwrap());
    let config = container["args"].as_array().into_iter().flatten().filter_map(Value::as_str);
    for file in files.chain(config.filter(|arg| arg.starts_with('/'))) {
        assert!(is_below(file), "{what}: {file} is not mounted");
    }
}

#[test]
fn a_rollout_waits_for_the_migration_and_takes_no_replica_away_before_the_next_is_ready() {
    for site in Site::all() {
        let update = at(site.deployment(), "/spec/strategy/rollingUpdate");
        assert_eq!(
            (&update["maxUnavailable"], &update["maxSurge"]),
            (&0.into(), &1.into()),
            "{}",
            site.overlay
        );
        let wait = list(site.pod(), "/initContainers/0/args");
        assert_eq!(wait[..2], ["migrate", "--wait"], "{}", site.overlay);
        let jobs = of_kind(&site.documents, "Job");
        let migrates = |job: &&Value| list(job, "/spec/template/spec/containers/0/args")[0] == "migrate";
        let job = jobs.iter().find(|job| migrates(job)).unwrap();
        // A Job that gives up before the pods do would leave them waiting for nobody.
        let limit = humantime::parse_duration(wait[2].as_str().unwrap()).unwrap();
        assert!(
            at(job, "/spec/activeDeadlineSeconds").as_u64().unwrap() < limit.as_secs(),
            "{}",
            site.overlay
        );
        let image = |container: &Value| container["image"].clone();
        let ours = image(site.worker());
        assert_eq!(image(at(site.pod(), "/initContainers/0")), ours, "{}", site.overlay);
        assert_eq!(image(at(job, "/spec/template/spec/containers/0")), ours, "{}", site.overlay);
    }
}

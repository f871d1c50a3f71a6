package monitoring_test

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

const folder = "../../docs/monitoring"

const ruleHead = `# Generated from alerts.yaml by go test ./test/monitoring -run Manifests -update; do not edit.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: talos-ccm
  namespace: monitoring
spec:
`

func TestManifests_RuleContainsAlerts(t *testing.T) {
	const file = "prometheusrule.yaml"

	var wanted strings.Builder
	wanted.WriteString(ruleHead)

	for line := range strings.Lines(read(t, "alerts.yaml")) {
		if line != "\n" {
			wanted.WriteString("  ")
		}

		wanted.WriteString(line)
	}

	if *update {
		if err := os.WriteFile(filepath.Join(folder, file), []byte(wanted.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	if read(t, file) != wanted.String() {
		t.Errorf("%s differs from alerts.yaml (go test ./test/monitoring -run Manifests -update)", file)
	}

	if spec := parse(t, wanted.String())["spec"]; !reflect.DeepEqual(spec, any(parse(t, read(t, "alerts.yaml")))) {
		t.Error("the PrometheusRule does not contain the alerts")
	}
}

// TestManifests_ScrapeConfigEqualsGuide compares the ScrapeConfig with the scrape configuration of the monitoring guide.
func TestManifests_ScrapeConfigEqualsGuide(t *testing.T) {
	block := regexp.MustCompile("(?s)```yaml\n(scrape_configs:.*?)```").FindStringSubmatch(read(t, "../guides/monitoring.md"))
	if block == nil {
		t.Fatal("the guide has no scrape_configs")
	}

	// The operator writes keys in camel case, and has other names for some.
	text := regexp.MustCompile(`(?m)^[ -]*[a-z_]+:`).ReplaceAllStringFunc(block[1], func(key string) string {
		return regexp.MustCompile(`_[a-z]`).ReplaceAllStringFunc(key, func(s string) string { return strings.ToUpper(s[1:]) })
	})
	text = strings.NewReplacer(
		"kubernetesSdConfigs:", "kubernetesSDConfigs:", "relabelConfigs:", "relabelings:", "role: node", "role: Node", "scheme: https", "scheme: HTTPS",
		"credentialsFile: /var/run/secrets/kubernetes.io/serviceaccount/token", "credentials: {name: talos-ccm-prometheus, key: token}",
	).Replace(text)

	wanted, _ := parse(t, text)["scrapeConfigs"].([]any)

	documents := strings.Split(read(t, "scrapeconfig.yaml"), "\n---\n")
	if got := parse(t, documents[len(documents)-1])["spec"]; !reflect.DeepEqual(got, wanted[0]) {
		t.Errorf("got  %v\nwant %v", got, wanted[0])
	}
}

func read(t *testing.T, file string) string {
	t.Helper()

	content, err := os.ReadFile(filepath.Join(folder, file))
	if err != nil && !*update {
		t.Fatal(err)
	}

	return string(content)
}

func parse(t *testing.T, text string) (object map[string]any) {
	t.Helper()

	if err := yaml.UnmarshalStrict([]byte(text), &object); err != nil {
		t.Fatal(err)
	}

	return object
}

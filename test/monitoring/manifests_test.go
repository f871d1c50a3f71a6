package monitoring_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

const dir = "../../docs/monitoring"

const ruleHead = `# Generated from alerts.yaml by go test ./test/monitoring -run Manifests -update; do not edit.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: talos-ccm
  namespace: monitoring
spec:
`

func TestManifests_RuleContainsAlerts(t *testing.T) {
	t.Parallel()

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
		require.NoError(t, os.WriteFile(filepath.Join(dir, file), []byte(wanted.String()), 0o600))
	}

	assert.Equal(t, wanted.String(), read(t, file), "go test ./test/monitoring -run Manifests -update")

	assert.Equal(t, parse(t, read(t, "alerts.yaml")), parse(t, wanted.String())["spec"])
}

// TestManifests_ScrapeConfigEqualsGuide compares the ScrapeConfig with the scrape configuration of the monitoring guide.
func TestManifests_ScrapeConfigEqualsGuide(t *testing.T) {
	t.Parallel()

	block := regexp.MustCompile("(?s)```yaml\n(scrape_configs:.*?)```").FindStringSubmatch(read(t, "../guides/monitoring.md"))
	require.NotNil(t, block)

	// The operator writes keys in camel case, and has other names for some.
	text := regexp.MustCompile(`(?m)^[ -]*[a-z_]+:`).ReplaceAllStringFunc(block[1], func(key string) string {
		return regexp.MustCompile(`_[a-z]`).ReplaceAllStringFunc(key, func(s string) string { return strings.ToUpper(s[1:]) })
	})
	text = strings.NewReplacer(
		"kubernetesSdConfigs:", "kubernetesSDConfigs:", "relabelConfigs:", "relabelings:", "role: node", "role: Node", "scheme: https", "scheme: HTTPS",
		"credentialsFile: /etc/prometheus/secrets/talos-ccm-metrics/token", "credentials: {name: talos-ccm-prometheus, key: token}",
	).Replace(text)

	wanted, _ := parse(t, text)["scrapeConfigs"].([]any)

	documents := strings.Split(read(t, "scrapeconfig.yaml"), "\n---\n")
	assert.Equal(t, wanted[0], parse(t, documents[len(documents)-1])["spec"])
}

func read(t *testing.T, file string) string {
	t.Helper()

	content, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil && !*update {
		t.Fatal(err)
	}

	return string(content)
}

func parse(t *testing.T, text string) (object map[string]any) {
	t.Helper()

	require.NoError(t, yaml.UnmarshalStrict([]byte(text), &object))

	return object
}

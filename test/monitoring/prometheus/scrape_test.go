package prometheus_test

import (
	"log/slog"
	"os"
	"regexp"
	"testing"

	"github.com/prometheus/prometheus/config"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/relabel"
)

// TestScrapeConfiguration_IsValid loads the scrape configuration of the monitoring guide and gives it control-plane
// Nodes as Prometheus' discovery does. It omits the discovery itself, which would compile all of Kubernetes' client;
// package monitoring compares it with the ScrapeConfig.
func TestScrapeConfiguration_IsValid(t *testing.T) {
	content, err := os.ReadFile(guide)
	if err != nil {
		t.Fatal(err)
	}

	block := regexp.MustCompile("(?s)```yaml\n(scrape_configs:.*?)```").FindSubmatch(content)
	if block == nil {
		t.Fatal("the guide has no scrape_configs")
	}

	discovery := regexp.MustCompile(`(?m)^    kubernetes_sd_configs:\n(?:^      .*\n)+`)

	loaded, err := config.Load(discovery.ReplaceAllString(string(block[1]), ""), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}

	scrape := loaded.ScrapeConfigs[0]
	if scrape.JobName != "talos-ccm" {
		t.Errorf("job %q", scrape.JobName)
	}

	for discovered, wanted := range map[string]string{"10.0.0.11:10250": "10.0.0.11:10459", "[2001:db8::11]:10250": "[2001:db8::11]:10459"} {
		node := labels.NewBuilder(labels.FromStrings("__address__", discovered, "__meta_kubernetes_node_name", "cp-1"))

		if !relabel.ProcessBuilder(node, scrape.RelabelConfigs...) || node.Get("__address__") != wanted || node.Get("instance") != "cp-1" {
			t.Errorf("%s is scraped at %q as instance %q, want %q", discovered, node.Get("__address__"), node.Get("instance"), wanted)
		}
	}
}

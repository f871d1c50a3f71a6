package prometheus_test

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const dashboardFile = "../../../docs/monitoring/dashboard.json"

// dashboard has the checked fields of a Grafana dashboard.
type dashboard struct {
	Templating struct {
		List []variable `json:"list"`
	} `json:"templating"`
	Panels []panel `json:"panels"`
}

type variable struct {
	Name       string      `json:"name"`
	Type       string      `json:"type"`
	Datasource *datasource `json:"datasource"`
	Definition string      `json:"definition"`
}

type datasource struct {
	UID string `json:"uid"`
}

type panel struct {
	Type        string      `json:"type"`
	Title       string      `json:"title"`
	Datasource  *datasource `json:"datasource"`
	Targets     []query     `json:"targets"`
	FieldConfig struct {
		Defaults struct {
			Unit string `json:"unit"`
		} `json:"defaults"`
	} `json:"fieldConfig"`
}

type query struct {
	RefID      string      `json:"refId"`
	Datasource *datasource `json:"datasource"`
	Expr       string      `json:"expr"`
	Legend     string      `json:"legendFormat"`
}

func readDashboard(t *testing.T) dashboard {
	t.Helper()

	content, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}

	var d dashboard
	if err := json.Unmarshal(content, &d); err != nil {
		t.Fatal(err)
	}

	return d
}

func TestDashboard_QueriesExportedMetrics(t *testing.T) {
	d, metrics := readDashboard(t), readExported(t)
	expressions := 0

	for _, p := range d.Panels {
		if p.Type == "row" {
			continue
		}

		problems := p.check(metrics)
		if p.FieldConfig.Defaults.Unit == "" {
			problems = append(problems, "no unit")
		}

		for _, problem := range problems {
			t.Errorf("panel %q: %s", p.Title, problem)
		}

		expressions += len(p.Targets)
	}

	t.Logf("%d panels, %d expressions", len(d.Panels), expressions)

	shown, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}

	for name := range metrics {
		if strings.HasPrefix(name, "talosccm_") && !strings.Contains(string(shown), name) {
			t.Errorf("metric %s is not shown", name)
		}
	}
}

// check returns the problems of the panel's queries.
func (p panel) check(metrics exported) (problems []string) {
	if len(p.Targets) == 0 {
		problems = append(problems, "no query")
	}

	ids := map[string]bool{}

	for _, q := range p.Targets {
		found, known := metrics.check(fill(q.Expr))
		problems = append(problems, found...)

		for _, label := range regexp.MustCompile(`\{\{(\w+)\}\}`).FindAllStringSubmatch(q.Legend, -1) {
			if !slices.Contains(known, label[1]) {
				problems = append(problems, fmt.Sprintf("legend %q of %s", q.Legend, q.Expr))
			}
		}

		if ids[q.RefID] || !q.Datasource.isVariable() {
			problems = append(problems, fmt.Sprintf("query %q is there twice, or has a data source of its own", q.RefID))
		}

		ids[q.RefID] = true
	}

	if !p.Datasource.isVariable() {
		problems = append(problems, "a data source of its own")
	}

	return problems
}

func (d *datasource) isVariable() bool { return d != nil && d.UID == "${datasource}" }

// fill replaces the variables as Grafana does.
func fill(expression string) string {
	return strings.NewReplacer("$cluster", ".*", "$job", "talos-ccm", "$instance", ".*", "$__rate_interval", "5m").Replace(expression)
}

func TestDashboard_Variables(t *testing.T) {
	metrics := readExported(t)
	selector := regexp.MustCompile(`^label_values\((.+), (\w+)\)$`)

	var names []string

	for _, v := range readDashboard(t).Templating.List {
		names = append(names, v.Name)

		if v.Type == "datasource" {
			continue
		}

		match := selector.FindStringSubmatch(v.Definition)
		if match == nil || !v.Datasource.isVariable() {
			t.Errorf("variable %s: definition %q, data source %v", v.Name, v.Definition, v.Datasource)

			continue
		}

		problems, known := metrics.check(fill(match[1]))
		if v.Name == "cluster" || v.Name == "job" { // before the job is known
			problems = nil
		}

		if len(problems) > 0 || !slices.Contains(known, match[2]) {
			t.Errorf("variable %s: %q, or no label %s", v.Name, problems, match[2])
		}
	}

	if wanted := []string{"datasource", "cluster", "job", "instance"}; !slices.Equal(names, wanted) {
		t.Errorf("variables %v, want %v", names, wanted)
	}
}

package prometheus_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
)

const (
	alertsFile = "../../../docs/monitoring/alerts.yaml"
	guide      = "../../../docs/guides/monitoring.md"
	runbookURL = "https://github.com/talos-ccm/talos-ccm/blob/main/docs/troubleshooting/"
)

var ofInstances = regexp.MustCompile(`^(\w+)\{([abc]+)(.*)$`)

// load returns the series of the cluster in promqltest's language.
func (s scene) load() string {
	values := map[string]string{}

	for line := range strings.Lines(healthy + s.series) {
		line = strings.ReplaceAll(strings.TrimSpace(line), "name=lease", `name="cloud-controller-manager-talos"`)
		all := []string{line}

		if match := ofInstances.FindStringSubmatch(line); match != nil {
			all = nil
			for _, instance := range match[2] {
				all = append(all, fmt.Sprintf(`%s{job="talos-ccm", instance="%c"%s`, match[1], instance, match[3]))
			}
		}

		for _, series := range all {
			if name, value, found := strings.Cut(series, "} "); found {
				values[name] = value
			}
		}
	}

	lines := []string{"load 1m"}
	for name, value := range values {
		lines = append(lines, "  "+name+"} "+value)
	}

	return strings.Join(lines, "\n")
}

// play evaluates all alerts every minute as Prometheus does, and returns those that fire at the end.
func (s scene) play(t *testing.T) []*rules.Alert {
	t.Helper()

	storage := promqltest.LoadedStorage(t, s.load())
	defer storage.Close()

	query := rules.EngineQueryFunc(promqltest.NewTestEngine(t, false, 0, 1_000_000), storage)
	alerts := loadAlerts(t)

	for elapsed := time.Duration(0); elapsed <= s.at; elapsed += time.Minute {
		for _, alert := range alerts {
			if _, err := alert.Eval(t.Context(), 0, time.Unix(0, 0).Add(elapsed), query, &url.URL{}, 0); err != nil {
				t.Fatal(err)
			}
		}
	}

	var firing []*rules.Alert

	for _, alert := range alerts {
		alert.ForEachActiveAlert(func(a *rules.Alert) {
			if a.State == rules.StateFiring {
				firing = append(firing, a)
			}
		})
	}

	return firing
}

func loadAlerts(t *testing.T) []*rules.AlertingRule {
	t.Helper()

	manager := rules.NewManager(&rules.ManagerOptions{
		Context:    t.Context(),
		Parser:     parser.NewParser(parser.Options{}),
		NotifyFunc: func(context.Context, string, ...*rules.Alert) {},
		QueryFunc:  func(context.Context, string, time.Time) (promql.Vector, error) { return nil, nil },
	})

	groups, errs := manager.LoadGroups(time.Minute, labels.EmptyLabels(), "", nil, false, alertsFile)
	for _, err := range errs {
		t.Fatal(err)
	}

	var alerts []*rules.AlertingRule
	for _, group := range groups {
		alerts = append(alerts, group.AlertingRules()...)
	}

	return alerts
}

func nameOf(alert *rules.Alert) string { return alert.Labels.Get(model.AlertNameLabel) }

func TestAlerts(t *testing.T) {
	fired, spared := map[string]bool{}, map[string]bool{}

	for _, s := range append(scenes(), scene{name: "all is well", at: 9 * time.Hour}) {
		for name := range strings.FieldsSeq(s.fires) {
			fired[name] = true
		}

		for name := range strings.FieldsSeq(s.near) {
			spared[name] = true
		}

		t.Run(s.name, func(t *testing.T) {
			t.Parallel()

			var names []string

			for _, alert := range s.play(t) {
				names = append(names, nameOf(alert))
				wantReadable(t, alert)
			}

			slices.Sort(names)

			if !slices.Equal(names, strings.Fields(s.fires)) {
				t.Errorf("after %s fire %v, want %v", s.at, names, s.fires)
			}
		})
	}

	for _, alert := range loadAlerts(t) {
		if !fired[alert.Name()] || !spared[alert.Name()] {
			t.Errorf("alert %s fires in a scene: %t; there is one in which it nearly does: %t", alert.Name(), fired[alert.Name()], spared[alert.Name()])
		}
	}
}

// wantReadable fails if a text of the alert was not expanded.
func wantReadable(t *testing.T, alert *rules.Alert) {
	t.Helper()

	alert.Annotations.Range(func(l labels.Label) {
		if strings.Contains(l.Value, "<error expanding") || strings.Contains(l.Value, "no value>") || strings.Contains(l.Value, "  ") {
			t.Errorf("%s: %s is %q", nameOf(alert), l.Name, l.Value)
		}
	})
}

func TestAlerts_AreComplete(t *testing.T) {
	content, err := os.ReadFile(alertsFile)
	if err != nil {
		t.Fatal(err)
	}

	groups, errs := rulefmt.Parse(content, false, model.LegacyValidation, parser.NewParser(parser.Options{}), slog.New(slog.DiscardHandler))
	for _, err := range errs {
		t.Error(err)
	}

	metrics := readExported(t)

	for _, group := range groups.Groups {
		for _, rule := range group.Rules {
			for _, problem := range slices.Concat(checkExpression(rule, metrics), checkTexts(rule)) {
				t.Errorf("%s: %s", rule.Alert, problem)
			}
		}
	}
}

// checkExpression returns the problems of an alert's expression, and of the labels that its texts name.
func checkExpression(rule rulefmt.Rule, metrics exported) []string {
	problems, known := metrics.check(rule.Expr)

	for _, reference := range regexp.MustCompile(`\$labels\.(\w+)`).FindAllStringSubmatch(fmt.Sprint(rule.Annotations), -1) {
		if !slices.Contains(known, reference[1]) {
			problems = append(problems, "its texts name label "+reference[1])
		}
	}

	return problems
}

// checkTexts returns the problems of an alert's other fields. Package test/docs checks that the runbooks exist.
func checkTexts(rule rulefmt.Rule) (problems []string) {
	if !slices.Contains([]string{"critical", "warning", "info"}, rule.Labels["severity"]) {
		problems = append(problems, fmt.Sprintf("severity %q", rule.Labels["severity"]))
	}

	if rule.Annotations["summary"] == "" || rule.Annotations["description"] == "" {
		problems = append(problems, "no summary or no description")
	}

	if url := rule.Annotations["runbook_url"]; !strings.HasPrefix(url, runbookURL) {
		problems = append(problems, fmt.Sprintf("runbook %q", url))
	}

	return problems
}

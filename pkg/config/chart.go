package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/pkg/rules"
	"github.com/talos-ccm/talos-ccm/pkg/similar"
)

// EnvironmentPrefix is the prefix of the environment variables that set flags.
const EnvironmentPrefix = "TALOS_CCM_"

// chartValues are the Helm values of the upstream Talos CCM that have a counterpart.
type chartValues struct {
	Transformations    []rules.Rule `json:"transformations,omitempty"`
	EnabledControllers []string     `json:"enabledControllers,omitempty"`
	ExtraArgs          []string     `json:"extraArgs,omitempty"`
	LogVerbosityLevel  string       `json:"logVerbosityLevel,omitempty"`
}

var (
	converted = []string{"transformations", "enabledControllers", "extraArgs", "logVerbosityLevel"}
	// chartKeys are values of the chart that a configuration file does not have.
	chartKeys = []string{
		"enabledControllers", "extraArgs", "logVerbosityLevel", "affinity", "fullnameOverride", "image", "imagePullSecrets", "nameOverride",
		"podAnnotations", "podSecurityContext", "priorityClassName", "replicaCount", "resources", "securityContext", "serviceAccount", "tolerations",
		"updateStrategy", "useDaemonSet",
	}
	// withoutCounterpart are controllers and flags that are not converted: unsupported, different, or set by the extension.
	withoutCounterpart = []string{
		"route", "cloud-node-route", "service", "service-lb-controller", "cloud-provider", "cloud-config", "leader-elect-resource-name", "secure-port",
		"authorization-always-allow-paths", "use-service-account-credentials",
	}
)

// isChart reports whether the document has Helm values of the upstream Talos CCM.
func isChart(n *yaml.Node) bool {
	return slices.ContainsFunc(chartKeys, func(key string) bool { return !child(n, key).IsZero() })
}

// variable is an environment variable and the path of the value that it is converted from.
type variable struct{ text, at string }

// convert turns Helm values into the document of the extension service.
func (f *file) convert(name string, root *yaml.Node) {
	if !f.checkAliases(root, map[*yaml.Node]int{}) {
		return
	}

	// Other values are for objects that an extension does not need.
	relevant := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Line: root.Line, Column: root.Column}

	var others []string

	for pair := range slices.Chunk(root.Content, 2) {
		if similar.Closest(pair[0].Value, converted) != "" {
			relevant.Content = append(relevant.Content, pair...)
		} else {
			others = append(others, pair[0].Value)
		}
	}

	var values chartValues

	f.decode(entry{key: relevant, value: relevant}, reflect.ValueOf(&values).Elem())
	f.result.Compiled = f.validate(&Config{Transformations: values.Transformations})

	variables, omitted := values.variables()

	var environment, at []string
	for _, v := range variables {
		environment, at = append(environment, v.text), append(at, v.at)
	}

	f.checkEnvironment(environment, at, f.service.CheckEnvironment)

	if len(f.problems) > 0 {
		return
	}

	text, err := []byte("{}\n"), error(nil)
	if transformations := child(root, "transformations"); len(transformations.Content) > 0 {
		text, err = dump(map[string]*yaml.Node{"transformations": transformations})
	}

	if err == nil {
		_, err = Parse("", text)
	}

	if err != nil {
		f.report(f.find("transformations"), "transformations", "cannot be converted, because it refers to anchors elsewhere in the file")

		return
	}

	f.result.Document = f.document(name, text, environment, append(omitted, others...), values.EnabledControllers)
}

// document returns the document of the extension service with a configuration file and an environment.
func (f *file) document(name string, text []byte, environment, omitted, enabled []string) string {
	var out strings.Builder

	fmt.Fprintf(&out, "# %s: %s\n", name, f.result.Compiled)

	if len(omitted) > 0 {
		fmt.Fprintf(&out, "# omitted: %s\n", shorten(strings.Join(omitted, ", "), 1000))
	}

	if !slices.Contains(enabled, lifecycle) {
		fmt.Fprintf(&out, "# added: the controller %s, as by default; the upstream CCM ran without it\n", lifecycle)
	}

	fmt.Fprintf(&out, "apiVersion: v1alpha1\nkind: %s\nname: %s\n", extensionKind, f.service.Name)

	if list, err := dump(map[string][]string{"environment": environment}); err == nil && len(environment) > 0 {
		out.Write(list)
	}

	fmt.Fprintf(&out, "configFiles:\n  - mountPath: %s\n    content: |\n", f.service.MountPath)

	for line := range strings.Lines(string(text)) {
		out.WriteString(strings.TrimRight("      "+line, " "))
	}

	return out.String()
}

// variables returns the environment variables that have the effect of the values, and the values without a counterpart.
func (v chartValues) variables() (list []variable, omitted []string) {
	add := func(flag, value, at string) {
		list = append(list, variable{EnvironmentPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_")) + "=" + value, at})
	}

	var enabled []string

	for _, controller := range v.EnabledControllers {
		if slices.Contains(withoutCounterpart, controller) {
			omitted = append(omitted, "the controller "+controller)
		} else {
			enabled = append(enabled, controller)
		}
	}

	if entries := entriesFor(enabled); len(entries) > 1 {
		add("controllers", strings.Join(entries, ","), "enabledControllers")
	}

	if v.LogVerbosityLevel != "" {
		add("v", v.LogVerbosityLevel, "logVerbosityLevel")
	}

	for i, arg := range v.ExtraArgs {
		flag, value, hasValue := strings.Cut(strings.TrimLeft(arg, "-"), "=")

		switch {
		case slices.Contains(withoutCounterpart, flag):
			omitted = append(omitted, arg)
		case hasValue:
			add(flag, value, fmt.Sprintf("extraArgs[%d]", i))
		default:
			add(flag, "true", fmt.Sprintf("extraArgs[%d]", i))
		}
	}

	return list, omitted
}

const lifecycle = "cloud-node-lifecycle"

// entriesFor returns entries for --controllers that keep the default, which includes the lifecycle controller.
func entriesFor(enabled []string) []string {
	entries, defaults := []string{"*"}, []string{"cloud-node", "node-csr-approval"}

	for _, name := range enabled {
		if !slices.Contains(append(defaults, lifecycle, "*"), name) {
			entries = append(entries, name)
		}
	}

	for _, name := range defaults {
		if len(enabled) > 0 && !slices.Contains(enabled, name) && !slices.Contains(enabled, "*") {
			entries = append(entries, "-"+name)
		}
	}

	return entries
}

func dump(value any) ([]byte, error) {
	return yaml.Dump(value, yaml.WithCompactSeqIndent(false), yaml.WithLineWidth(-1))
}

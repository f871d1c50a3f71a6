package ccm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/internal/events"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// Reasons of the Events on the local machine's Node.
const (
	// ReasonConfigInvalid: its configuration is invalid (docs/reference/configuration.md#validation).
	// Fix: docs/troubleshooting/configuration.md#invalid-configuration.
	ReasonConfigInvalid = "ConfigInvalid"
	// ReasonConfigValid (Normal): its configuration is valid again.
	ReasonConfigValid = "ConfigValid"
	// ReasonSecurePortUnavailable: its instance cannot open the port for metrics and health.
	// Fix: docs/troubleshooting/installation.md#not-running.
	ReasonSecurePortUnavailable = "SecurePortUnavailable"
)

// nodeReference returns the object of an Event on a Node. Its UID is the name, as in the Events of the kubelet.
func nodeReference(name string) *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: name, UID: types.UID(name)}
}

// NodeOptions returns a configuration's options for Nodes. fallback applies if the configuration does not set
// providerIDFallback.
func NodeOptions(c *config.Compiled, fallback config.ProviderIDFallback) nodespec.Options {
	return nodespec.Options{
		ClusterName:            c.ClusterName,
		PreferIPv6:             c.PreferIPv6,
		ProviderIDFromNodeIP:   cmp.Or(c.ProviderIDFallback, fallback) == config.FallbackNodeIP,
		FollowTopology:         c.FollowTopology,
		OneExternalIPPerFamily: c.OneExternalIPPerFamily,
		OmitConditions:         c.OmitConditions,
		Rules:                  c.Rules,
		Selector:               c.NodeSelector,
	}
}

// reportConfiguration emits an Event on the local machine's Node when the configuration becomes invalid, and when it
// becomes valid again. It returns when ctx ends, and emits nothing outside Talos, where there is no such Node.
func (m *Manager) reportConfiguration(ctx context.Context, recorder record.EventRecorder) {
	nodename := m.awaitLocalNodename(ctx)
	if nodename == "" {
		return
	}

	var (
		node     = nodeReference(nodename)
		mu       sync.Mutex
		reported string
	)

	report := func() {
		mu.Lock()
		defer mu.Unlock()

		problem := ""
		if err := m.store.Problem(); err != nil {
			problem = err.Error()
		}

		switch {
		case problem == reported || ctx.Err() != nil:
		case problem == "":
			recorder.Event(node, corev1.EventTypeNormal, ReasonConfigValid, "Configuration is valid again and in force")
		case m.store.Current() == nil:
			recorder.Event(node, corev1.EventTypeWarning, ReasonConfigInvalid,
				events.Truncate("Configuration is invalid and there is no last-known-good configuration; no Node is updated: "+problem))
		default:
			recorder.Event(node, corev1.EventTypeWarning, ReasonConfigInvalid,
				events.Truncate("Configuration is invalid; the last-known-good configuration stays in force: "+problem))
		}

		reported = problem
	}

	defer m.store.Subscribe(report)()

	report()
	<-ctx.Done()
}

// RestartError is returned by Manager.Run on Talos if the lease was lost, or if the ExtensionServiceConfig document sets
// environment variables that the process was not started with. Talos passes them only to services that start after the
// document was loaded; at boot, services start earlier. The caller should replace the process by one with Environment.
type RestartError struct {
	Environment []string
}

// Error implements error.
func (*RestartError) Error() string {
	return "leader election lost, or environment of the ExtensionServiceConfig document changed"
}

// runtimeVariables match the values of the variables that Go's runtime reads before main. Invalid ones end the process or
// are ignored. FIPS 140 mode is the only GODEBUG setting that begins with an f.
var runtimeVariables = map[string]*regexp.Regexp{
	"GOGC":        regexp.MustCompile(`^(off|\d{1,9})$`),
	"GOMAXPROCS":  regexp.MustCompile(`^[1-9]\d{0,8}$`),
	"GOMEMLIMIT":  regexp.MustCompile(`^(off|\d{1,18}B?|\d{1,15}KiB|\d{1,12}MiB|\d{1,9}GiB|\d{1,6}TiB)$`),
	"GOTRACEBACK": regexp.MustCompile(`^(none|single|all|system|crash|wer|\d)$`),
	"GODEBUG":     regexp.MustCompile(`^((fips140=(off|on|only|debug)|[a-eg-z]\w*=[^,]+)(,|$))+$`),
}

// CheckDocument returns why the process cannot be started with the environment variables of a document, one line per
// error. Talos does not validate the environment.
func (o *Options) CheckDocument(variables []string) error {
	var (
		valid []string
		errs  []error
	)

	for _, variable := range variables {
		switch name, value, found := strings.Cut(variable, "="); {
		case !found, name == "", strings.ContainsRune(variable, 0):
			errs = append(errs, fmt.Errorf("environment: %q is not of the form NAME=value", events.Truncate(variable)))
		case name == baseVariable:
			errs = append(errs, fmt.Errorf("environment: %s is reserved for talos-ccm", name))
		case name == "TALOS_CCM_KUBECONFIG":
			errs = append(errs, fmt.Errorf("environment: %s cannot be set: the extension uses the kubeconfig of its machine", name))
		case value != "" && runtimeVariables[name] != nil && !runtimeVariables[name].MatchString(value):
			errs = append(errs, fmt.Errorf("environment: %s: %q is not a value that Go's runtime accepts; see https://pkg.go.dev/runtime#hdr-Environment_Variables", name, value))
		default:
			valid = append(valid, variable)
		}
	}

	return errors.Join(append(errs, o.CheckEnvironment(overlay(baseOf(o.Environment), valid)))...)
}

// restart returns the RestartError that the document in force requires, or nil.
func (m *Manager) restart() *RestartError {
	base := baseOf(m.options.Environment)
	data, _ := json.Marshal(base) //nolint:errchkjson // strings cannot fail
	record := []string{baseVariable + "=" + string(data)}

	wanted := overlay(overlay(base, m.store.Environment()), record)
	if slices.Equal(wanted, overlay(m.options.Environment, record)) {
		return nil
	}

	return &RestartError{Environment: wanted}
}

// baseVariable holds the environment that the process had before it was first replaced, as JSON. A variable that is
// removed from the document gets its value from there. No flag has this name.
const baseVariable = "TALOSCCM_BASE_ENVIRONMENT"

// baseOf returns the environment that the process had before it was first replaced.
func baseOf(environ []string) []string {
	for _, variable := range environ {
		var base []string

		if value, found := strings.CutPrefix(variable, baseVariable+"="); found && json.Unmarshal([]byte(value), &base) == nil {
			return base
		}
	}

	return environ
}

// overlay returns environ with variables set. Both have the form NAME=value; the last value of a name wins.
func overlay(environ, variables []string) []string {
	result := slices.Clone(environ)

	for _, variable := range variables {
		name, _, _ := strings.Cut(variable, "=")

		i := slices.IndexFunc(result, func(existing string) bool { return strings.HasPrefix(existing, name+"=") })
		if i < 0 {
			result = append(result, variable)
		} else {
			result[i] = variable
		}
	}

	return result
}

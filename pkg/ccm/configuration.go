package ccm

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
)

// Reasons of the Events on the own Node.
const (
	ReasonConfigInvalid = "ConfigInvalid"
	ReasonConfigValid   = "ConfigValid"
)

// RestartError is what App.Run returns when the ExtensionServiceConfig document sets environment variables that the process was not started with: Talos gives
// them only to a service that it starts after it has loaded the document, and at boot it starts services before. The process should be
// replaced by one with Environment.
type RestartError struct {
	Environment []string
}

// Error implements error.
func (r *RestartError) Error() string { return "the environment has changed" }

// source is where this run's configuration is delivered.
func (a *App) source() settings.Source {
	path := a.options.Framework.KubeCloudShared.CloudProvider.CloudConfigFile

	switch {
	case a.socket != nil:
		return settings.Extension{Admin: a.socket.Admin, Name: extension.Name, Clock: a.clock}
	case path != "":
		return settings.File{Path: path, Clock: a.clock}
	default:
		return settings.Defaults{}
	}
}

// checkEnvironment says whether the process could be started with a document's variables. Talos hands on whatever a document has.
func (a *App) checkEnvironment(variables []string) error {
	for _, variable := range variables {
		switch name, _, both := strings.Cut(variable, "="); {
		case !both, name == "", strings.ContainsRune(variable, 0):
			return fmt.Errorf("environment: %q is not NAME=value", abridged(variable))
		case name == baseVariable:
			return fmt.Errorf("environment: %s is talos-ccm's own", name)
		}
	}

	if a.options.CheckEnvironment == nil {
		return nil
	}

	return a.options.CheckEnvironment(overlay(baseOf(a.options.Environment), variables))
}

// restart is the RestartError that the document in force asks for, or nil.
func (a *App) restart() *RestartError {
	base := baseOf(a.options.Environment)
	wanted := overlay(base, a.settings.Environment())

	if slices.Equal(wanted, withoutBase(a.options.Environment)) {
		return nil
	}

	data, _ := json.Marshal(base) //nolint:errchkjson // they are texts

	return &RestartError{Environment: append(wanted, baseVariable+"="+string(data))}
}

// baseVariable has the environment that the process was started with before it replaced itself: what the document takes back is to be as it was. Its
// name is no flag's.
const baseVariable = "TALOSCCM_BASE_ENVIRONMENT"

func baseOf(environ []string) []string {
	for _, entry := range environ {
		var base []string

		if value, found := strings.CutPrefix(entry, baseVariable+"="); found && json.Unmarshal([]byte(value), &base) == nil {
			return base
		}
	}

	return environ
}

func withoutBase(environ []string) []string {
	return slices.DeleteFunc(slices.Clone(environ), func(entry string) bool { return strings.HasPrefix(entry, baseVariable+"=") })
}

// overlay sets variables in environ, as NAME=value both; the last of a name wins.
func overlay(environ, variables []string) []string {
	result := slices.Clone(environ)

	for _, variable := range variables {
		name, _, _ := strings.Cut(variable, "=")

		i := slices.IndexFunc(result, func(entry string) bool { return strings.HasPrefix(entry, name+"=") })
		if i < 0 {
			result = append(result, variable)
		} else {
			result[i] = variable
		}
	}

	return result
}

// nodeOptions are the choices for Nodes now in force.
func (l *leader) nodeOptions() nodespec.Options {
	return NodeOptions(l.settings.Current(), l.options.ProviderIDFallback)
}

// NodeOptions are a configuration's choices for Nodes; fallback is the flag's, for a configuration that does not say.
func NodeOptions(c *config.Compiled, fallback config.ProviderIDFallback) nodespec.Options {
	return nodespec.Options{
		ClusterName:          c.ClusterName,
		PreferIPv6:           c.PreferIPv6,
		ProviderIDFromNodeIP: cmp.Or(c.ProviderIDFallback, fallback) == config.FallbackNodeIP,
		Rules:                c.Rules,
		Selector:             c.NodeSelector,
	}
}

// reportConfiguration has an Event on this machine's Node whenever a configuration is not valid, and when there is a valid one again.
func (l *leader) reportConfiguration(ctx context.Context) {
	nodename := l.awaitLocalNodename(ctx)
	if nodename == "" {
		return
	}

	// As the kubelet refers to its Node.
	node := &corev1.ObjectReference{Kind: "Node", Name: nodename, UID: types.UID(nodename)}
	changes := make(chan struct{}, 1)
	changes <- struct{}{}

	defer l.settings.Subscribe(func() {
		select {
		case changes <- struct{}{}:
		default:
		}
	})()

	reported := ""

	for {
		select {
		case <-ctx.Done():
			return
		case <-changes:
		}

		problem := ""
		if err := l.settings.Problem(); err != nil {
			problem = err.Error()
		}

		switch problem {
		case reported:
		case "":
			l.recorder.Event(node, corev1.EventTypeNormal, ReasonConfigValid, "The configuration is valid again and in force")
		default:
			consequence := "The last good configuration stays in force"
			if l.settings.Current() == nil {
				consequence = "There is no good configuration, and nothing is written until there is"
			}

			l.recorder.Event(node, corev1.EventTypeWarning, ReasonConfigInvalid, abridged(fmt.Sprintf("%s: %s", consequence, problem)))
		}

		reported = problem
	}
}

// awaitLocalNodename asks until this machine knows its nodename. It is empty outside Talos, where there is no Node of ours, and when ctx ends.
func (l *leader) awaitLocalNodename(ctx context.Context) string {
	if l.socket == nil {
		return ""
	}

	for backoff := newBackoff(); ; {
		if nodename := l.localNodename(ctx); nodename != "" {
			return nodename
		}

		select {
		case <-ctx.Done():
			return ""
		case <-l.clock.After(backoff.Step()):
		}
	}
}

// abridged keeps to what an Event can hold (validation of events.k8s.io: 1 KiB).
func abridged(message string) string {
	const longest = 1000

	if len(message) <= longest {
		return message
	}

	return strings.ToValidUTF8(message[:longest], "") + "…"
}

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/siderolabs/talos/pkg/machinery/client"
	clientconfig "github.com/siderolabs/talos/pkg/machinery/client/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const (
	// renderTimeout limits the time to read a machine over the Talos API.
	renderTimeout = 30 * time.Second
	// maxMachineFile limits the size of talosctl's output, which is about 10 MB for a thousand machines.
	maxMachineFile = 256 << 20
)

// renderOptions are the flags of `talos-ccm render`.
type renderOptions struct {
	config      string
	fallback    string
	machine     string
	node        string
	talosconfig string
	arch        string
	version     string
	nodeIPs     []string
	output      string
	facts       []string // optional facts that the configuration uses
}

func newRenderCommand() *cobra.Command {
	var o renderOptions

	cmd := &cobra.Command{
		Use:                   "render (--machine FILE|- | --node NAME|ADDRESS) [--config FILE] [flags]",
		Short:                 "Preview the Node of a machine",
		DisableFlagsInUseLine: true,
		Long: `Print the labels, annotations, taints, addresses and providerID that talos-ccm would write to the Node of a machine, and the rule that sets each of
them. The command writes nothing.

It reads the machine over the Talos API, as talosctl does:

  talos-ccm render --node 10.0.0.2 --config config.yaml

or from a file with the output of talosctl in YAML or JSON. The file may contain several machines:

  ` + preview.Command() + ` > machine.yaml
  talos-ccm render --machine machine.yaml --config config.yaml

If the configuration uses facts from other resources, a warning names these.

The exit code is 1 if the configuration is invalid, if the machine cannot be read, or if the Node would stay uninitialized. Invalid values, which
talos-ccm omits, are printed as problems and do not affect the exit code.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}

	flags := cmd.Flags()
	flags.StringVar(&o.config, "config", "", "Configuration file, or - for standard input. (default: no rules)")
	flags.StringVar(&o.machine, "machine", "", "File with the output of talosctl, or - for standard input.")
	flags.StringVar(&o.node, "node", "", "Name or address of a machine to read over the Talos API.")
	flags.StringVar(&o.talosconfig, "talosconfig", "", "Path of the talosconfig for --node. (default $TALOSCONFIG or ~/.talos/config)")
	flags.StringVar(&o.arch, "arch", "", "Architecture of the Node as reported by its kubelet, such as amd64.")
	flags.StringVar(&o.version, "kubernetes-version", "", "Kubernetes version of the Node as reported by its kubelet, such as v1.36.2.")
	flags.StringSliceVar(&o.nodeIPs, "node-ip", nil, "Node IPs of the kubelet. (default: the node IPs that Talos configures)")
	flags.StringVar(&o.fallback, "provider-id-fallback", string(config.FallbackUUID),
		"providerID source for platforms without an instance ID: uuid or node-ip. global.providerIDFallback in the configuration takes precedence.")
	flags.StringVarP(&o.output, "output", "o", preview.Formats()[0], "Output format: "+strings.Join(preview.Formats(), ", ")+".")

	cmd.MarkFlagsOneRequired("machine", "node")
	cmd.MarkFlagsMutuallyExclusive("machine", "node")

	return cmd
}

func (o renderOptions) run(cmd *cobra.Command) error {
	options, err := o.nodeOptions(cmd.InOrStdin())
	if err != nil {
		return err
	}

	o.facts = slices.Concat(options.Rules.Facts(), options.Selector.Facts())
	kubelet := preview.Kubelet{Architecture: o.arch, KubernetesVersion: o.version}

	for _, text := range o.nodeIPs {
		ip, err := netip.ParseAddr(text)
		if err != nil {
			return fmt.Errorf("--node-ip: %w", err)
		}

		kubelet.NodeIPs = append(kubelet.NodeIPs, ip)
	}

	machines, err := o.machines(cmd)
	if err != nil {
		return err
	}

	if len(machines) > 1 && len(kubelet.NodeIPs) > 0 {
		return fmt.Errorf("--node-ip cannot be used with more than one machine, got %d", len(machines))
	}

	reports := preview.Render(machines, kubelet, options)
	if err := preview.Write(cmd.OutOrStdout(), o.output, reports); err != nil {
		return err
	}

	var pending []string

	for _, report := range reports {
		if report.Pending != "" && !report.Unmanaged {
			pending = append(pending, report.Name)
		}
	}

	if len(pending) > 0 {
		return fmt.Errorf("nodes not ready to initialize: %s", strings.Join(pending, ", "))
	}

	return nil
}

// nodeOptions returns the options that talos-ccm would use with the given flags and configuration file.
func (o renderOptions) nodeOptions(stdin io.Reader) (nodespec.Options, error) {
	if !slices.Contains([]string{string(config.FallbackUUID), string(config.FallbackNodeIP)}, o.fallback) {
		return nodespec.Options{}, fmt.Errorf("--provider-id-fallback: invalid value %q, want %q or %q", o.fallback, config.FallbackUUID, config.FallbackNodeIP)
	}

	if o.config == "-" && o.machine == "-" {
		return nodespec.Options{}, errors.New("--config and --machine cannot both be standard input")
	}

	var (
		name string
		text []byte
		err  error
	)

	if o.config != "" {
		if name, text, err = readConfig(stdin, o.config); err != nil {
			return nodespec.Options{}, fmt.Errorf("read configuration: %w", err)
		}
	}

	c, err := parseFile(name, text)
	if err != nil {
		return nodespec.Options{}, err
	}

	return ccm.NodeOptions(c.Compiled, config.ProviderIDFallback(o.fallback)), nil
}

func (o renderOptions) machines(cmd *cobra.Command) ([]preview.Machine, error) {
	if o.node == "" {
		return o.readFile(cmd)
	}

	m, err := o.readNode(cmd.Context())
	if err == nil && m.Nodename == "" {
		err = errors.New("it has not published its nodename yet")
	}

	if err != nil {
		return nil, fmt.Errorf("read machine %s: %w", o.node, err)
	}

	return []preview.Machine{{Node: o.node, Machine: m}}, nil
}

// readFile reads machines from the output of talosctl. It prints a warning if resources may be missing.
func (o renderOptions) readFile(cmd *cobra.Command) ([]preview.Machine, error) {
	text, err := readInput(cmd.InOrStdin(), o.machine, maxMachineFile+1)
	if err == nil && len(text) > maxMachineFile {
		err = fmt.Errorf("file is larger than %d MiB", maxMachineFile>>20)
	}

	if err != nil {
		return nil, fmt.Errorf("read machine: %w", err)
	}

	source := o.machine
	if source == "-" {
		source = "stdin"
	}

	machines, err := preview.Parse(text, o.facts...)
	if err != nil {
		return nil, fmt.Errorf("read machine from %s: %w", source, err)
	}

	incomplete := false

	for _, m := range machines {
		if m.IsEmpty() {
			return nil, fmt.Errorf("read machine from %s: %s; save all resources:\n  %s", source, lack(m, m.Missing), preview.Command(o.facts...))
		}

		if len(m.Missing) > 0 {
			fmt.Fprintf(cmd.ErrOrStderr(), "Warning: %s: %s\n", source, lack(m, m.Missing))

			incomplete = true
		}
	}

	if incomplete {
		fmt.Fprintf(cmd.ErrOrStderr(), "If the machine has such resources, the result may be wrong. To print all of them:\n  %s\n", preview.Command(o.facts...))
	}

	return machines, nil
}

// lack says that resources of the kinds are missing. The output of talosctl without --nodes does not name the machine.
func lack(m preview.Machine, kinds []string) string {
	text := "no " + strings.Join(kinds, ", ")
	if name := cmp.Or(m.Node, m.Machine.Nodename); name != "" {
		text += " of machine " + name
	}

	return text
}

// readNode reads a machine over the Talos API, through the endpoints of the talosconfig or, without endpoints, from the machine itself.
func (o renderOptions) readNode(ctx context.Context) (machine.Machine, error) {
	ctx, cancel := context.WithTimeout(ctx, renderTimeout)
	defer cancel()

	talosconfig, err := o.readTalosconfig()
	if err != nil {
		return machine.Machine{}, err
	}

	current, ok := talosconfig.Contexts[talosconfig.Context]
	if !ok {
		return machine.Machine{}, fmt.Errorf("read talosconfig: context %q not found", talosconfig.Context)
	}

	options := []client.OptionFunc{client.WithConfig(talosconfig), client.WithDefaultGRPCDialOptions()}

	if len(current.Endpoints) == 0 {
		options = append(options, client.WithEndpoints(o.node))
	}

	c, err := client.New(ctx, options...)
	if err != nil {
		return machine.Machine{}, err
	}
	defer c.Close() //nolint:errcheck // no call is in flight

	ctx = client.WithNode(ctx, memberAddress(ctx, c, o.node))

	view := machine.View{Facts: o.facts}
	watched := machine.WatchedKinds()
	polled, constant := machine.FactKinds(o.facts)

	for i, kind := range slices.Concat(watched, machine.PolledKinds(), polled, constant) {
		// Talos answers PermissionDenied for a kind that its version does not have. Every version has the watched kinds.
		list, err := c.COSI.List(ctx, kind)
		if err != nil && (i < len(watched) || status.Code(err) != codes.PermissionDenied) {
			return machine.Machine{}, fmt.Errorf("list %s: %w", kind.Type(), err)
		}

		view.ReplaceKind(kind, list.Items)
	}

	return view.Machine(), nil
}

// readTalosconfig reads the file that talosctl would use.
func (o renderOptions) readTalosconfig() (*clientconfig.Config, error) {
	paths := []clientconfig.Path{{Path: o.talosconfig}}

	if o.talosconfig == "" {
		var err error
		if paths, err = clientconfig.GetDefaultPaths(); err != nil {
			return nil, fmt.Errorf("find talosconfig: %w", err)
		}
	}

	var errs []error

	for _, path := range paths {
		talosconfig, err := talosapi.ReadTalosconfig(path.Path)
		if !errors.Is(err, fs.ErrNotExist) {
			return talosconfig, err
		}

		errs = append(errs, err)
	}

	return nil, errors.Join(errs...)
}

// memberAddress returns the address of the cluster member with the given name. It returns other nodes unchanged; apid resolves their names.
func memberAddress(ctx context.Context, c *client.Client, node string) string {
	if _, err := netip.ParseAddr(node); err == nil {
		return node
	}

	members, err := safe.StateListAll[*cluster.Member](ctx, c.COSI)
	if err != nil {
		return node // if the endpoints cannot be reached, the calls to the node report it
	}

	for member := range members.All() {
		spec := member.TypedSpec()
		if (member.Metadata().ID() == node || spec.Hostname == node) && len(spec.Addresses) > 0 {
			return spec.Addresses[0].String()
		}
	}

	return node
}

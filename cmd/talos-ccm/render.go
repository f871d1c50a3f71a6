package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
)

// maxMachineFile limits the size of talosctl's output, which is about 10 MB for a thousand machines.
const maxMachineFile = 256 << 20

// renderOptions are the flags of `talos-ccm render`.
type renderOptions struct {
	spec    nodeFlags
	talos   talosFlags
	machine string
	node    string
	arch    string
	version string
	nodeIPs []string
	output  string
	kinds   machine.Kinds // that the configuration uses
}

func newRenderCommand() *cobra.Command {
	var o renderOptions

	cmd := &cobra.Command{
		Use:                   "render (--machine FILE|- | --node NAME|ADDRESS) [--config FILE] [flags]",
		Short:                 "Preview the Node of a machine",
		DisableFlagsInUseLine: true,
		Long: `Print the labels, annotations, taints, addresses and providerID that talos-ccm would write to the
Node of a machine, and the rule that sets each of them. The command writes nothing.

It reads the machine over the Talos API, as talosctl does:

  talos-ccm render --node 10.0.0.2 --config config.yaml

or from a file with the output of talosctl in YAML or JSON. The file may contain several machines:

  ` + preview.Command(machine.BaseKinds()) + ` > machine.yaml
  talos-ccm render --machine machine.yaml --config config.yaml

If the configuration uses facts from other resources, a warning names these.

The exit code is 1 if the configuration is invalid, if the machine cannot be read, or if the Node
would stay uninitialized. Invalid values, which talos-ccm omits, are printed as problems and do not
affect the exit code.`,
		Args: cobra.NoArgs,
		RunE: o.run,
	}

	flags := cmd.Flags()
	flags.StringVar(&o.machine, "machine", "", "File with the output of talosctl, or - for standard input.")
	flags.StringVarP(&o.node, "node", "n", "", "Name or address of a machine to read over the Talos API.")
	flags.StringVar(&o.arch, "arch", "", "Architecture of the Node as reported by its kubelet, such as amd64.")
	flags.StringVar(&o.version, "kubernetes-version", "", "Kubernetes version of the Node as reported by its kubelet, such as v1.36.2.")
	flags.StringSliceVar(&o.nodeIPs, "node-ip", nil, "Node IPs of the kubelet. (default: the node IPs that Talos configures)")
	addChoice(flags, &o.output, "output", "o", "Output format", preview.Formats()...)
	o.spec.add(flags)
	o.talos.add(flags)

	cmd.MarkFlagsOneRequired("machine", "node")
	cmd.MarkFlagsMutuallyExclusive("machine", "node")

	return cmd
}

func (o *renderOptions) run(cmd *cobra.Command, _ []string) error {
	if o.spec.config == "-" && o.machine == "-" {
		return errors.New("--config and --machine cannot both be standard input")
	}

	options, err := o.spec.options(cmd.InOrStdin())
	if err != nil {
		return err
	}

	o.kinds = kindsOf(options)

	kubelet := preview.Kubelet{Architecture: o.arch, KubernetesVersion: o.version}

	for _, text := range o.nodeIPs {
		ip, err := netip.ParseAddr(text)
		if err != nil {
			return fmt.Errorf("--node-ip: %q is not an IP address", text)
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

	if pending := (preview.Comparison{Nodes: reports}).Pending(); len(pending) > 0 {
		return fmt.Errorf("nodes not ready to initialize: %s", strings.Join(pending, ", "))
	}

	return nil
}

// kindsOf returns the kinds that the configuration uses.
func kindsOf(options nodespec.Options) machine.Kinds {
	return machine.BaseKinds().WithFacts(options.Rules.FactKinds() | options.Selector.FactKinds())
}

// nodeFlags choose what Nodes get, as the service's configuration does.
type nodeFlags struct {
	config   string
	fallback string
}

func (f *nodeFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.config, "config", "", "Configuration file, or - for standard input. (default: no rules)")
	addChoice(flags, &f.fallback, "provider-id-fallback", "", "providerID source for platforms that publish no providerID, unless the configuration has global.providerIDFallback",
		string(config.FallbackUUID), string(config.FallbackNodeIP))
}

// options returns the options that talos-ccm would use with the given flags and configuration file.
func (f *nodeFlags) options(stdin io.Reader) (nodespec.Options, error) {
	var (
		name string
		text []byte
		err  error
	)

	if f.config != "" {
		if name, text, err = readConfig(stdin, f.config); err != nil {
			return nodespec.Options{}, fmt.Errorf("read configuration: %w", err)
		}
	}

	c, err := parseFile(name, text)
	if err != nil {
		return nodespec.Options{}, err
	}

	return ccm.NodeOptions(c, config.ProviderIDFallback(f.fallback)), nil
}

func (o *renderOptions) machines(cmd *cobra.Command) ([]preview.Machine, error) {
	if o.node == "" {
		return o.readFile(cmd)
	}

	reader, err := o.talos.open(cmd.Context(), o.kinds)
	if err != nil {
		return nil, fmt.Errorf("read machine %s: %w", o.node, err)
	}
	defer reader.close()

	m, err := reader.read(cmd.Context(), o.node)
	if err != nil {
		return nil, fmt.Errorf("read machine %s: %w", o.node, err)
	}

	return []preview.Machine{{Node: o.node, Machine: m}}, nil
}

// readFile reads machines from the output of talosctl. It prints a warning if resources may be missing.
func (o *renderOptions) readFile(cmd *cobra.Command) ([]preview.Machine, error) {
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

	machines, err := preview.Parse(text, o.kinds)
	if err != nil {
		return nil, fmt.Errorf("read machine from %s: %w", source, err)
	}

	incomplete := false

	for _, m := range machines {
		if m.IsEmpty() {
			return nil, fmt.Errorf("read machine from %s: %s; save all resources:\n  %s", source, lack(m, m.Missing), preview.Command(o.kinds))
		}

		if len(m.Missing) > 0 {
			fmt.Fprintf(cmd.ErrOrStderr(), "Warning: %s: %s\n", source, lack(m, m.Missing))

			incomplete = true
		}
	}

	if incomplete {
		fmt.Fprintf(cmd.ErrOrStderr(), "If the machine has such resources, the result may be wrong. To print all of them:\n  %s\n", preview.Command(o.kinds))
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

package main

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/spf13/cobra"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	nodecontroller "github.com/talos-ccm/talos-ccm/pkg/controllers/node"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
	"github.com/talos-ccm/talos-ccm/pkg/version"
)

// formatMachine is the output format of a file for --machine.
const formatMachine = "machine"

type renderOptions struct {
	spec    nodeFlags
	talos   talosFlags
	machine string
	node    string
	arch    string
	version string
	nodeIPs []string
	output  string
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

or from a file that it has written before. The file has all that a configuration can use:

  talos-ccm render --node 10.0.0.2 -o machine > machine.yaml
  talos-ccm render --machine machine.yaml --config config.yaml

The exit code is 1 if the configuration is invalid, if the machine cannot be read, or if the Node
would stay uninitialized. Invalid values, which talos-ccm omits, are printed as problems and do not
affect the exit code.`,
		Args: cobra.NoArgs,
		RunE: o.run,
	}

	flags := cmd.Flags()
	flags.StringVar(&o.machine, "machine", "", "File with the output of -o machine, or - for standard input.")
	flags.StringVarP(&o.node, "node", "n", "", "Address of a machine to read over the Talos API, or a name that its endpoint resolves.")
	flags.StringVar(&o.arch, "arch", "", "Architecture of the Node as reported by its kubelet, such as amd64.")
	flags.StringVar(&o.version, "kubernetes-version", "", "Kubernetes version of the Node as reported by its kubelet, such as v1.36.2.")
	flags.StringSliceVar(&o.nodeIPs, "node-ip", nil, "Node IPs of the kubelet. (default: the node IPs that Talos configures)")
	addChoice(cmd, &o.output, "output", "o", "Output format", append(preview.Formats(), formatMachine)...)
	o.spec.add(cmd)
	o.talos.add(flags)

	cmd.MarkFlagsOneRequired("machine", "node")
	cmd.MarkFlagsMutuallyExclusive("machine", "node")

	return cmd
}

func (o *renderOptions) run(cmd *cobra.Command, _ []string) error {
	if o.spec.config == "-" && o.machine == "-" {
		return errors.New("--config and --machine cannot both be standard input")
	}

	options, err := o.spec.options(cmd)
	if err != nil {
		return err
	}

	kubelet := preview.Kubelet{Architecture: o.arch, KubernetesVersion: o.version}

	for _, text := range o.nodeIPs {
		ip, err := netip.ParseAddr(text)
		if err != nil {
			return fmt.Errorf("--node-ip: %q is not an IP address", text)
		}

		kubelet.NodeIPs = append(kubelet.NodeIPs, ip)
	}

	m, err := o.read(cmd, kindsOf(options))
	if err != nil {
		return err
	}

	if o.output == formatMachine {
		return preview.WriteMachine(cmd.OutOrStdout(), m)
	}

	report := preview.Render(m, kubelet, options)
	if err := preview.Write(cmd.OutOrStdout(), o.output, report); err != nil {
		return err
	}

	if report.Pending {
		return fmt.Errorf("node not ready to initialize: %s", report.Name)
	}

	return nil
}

func kindsOf(options nodespec.Options) machine.Kinds {
	return machine.BaseKinds().WithFacts(options.Rules.FactKinds() | options.Selector.FactKinds())
}

// nodeFlags choose what Nodes get, as the service's configuration does.
type nodeFlags struct {
	config   string
	fallback string
}

func (f *nodeFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.config, "config", "", "Configuration file, or a document, whose environment applies unless a flag is given; - for standard input. (default: no rules)")
	addChoice(cmd, &f.fallback, "provider-id-fallback", "", "providerID source for platforms that publish no providerID, unless the configuration has global.providerIDFallback",
		string(config.FallbackUUID), string(config.FallbackNodeIP))
}

// options returns the options that talos-ccm would use with the flags of cmd and the configuration file. If the file has the
// environment of the service, its variables apply. It prints the warnings about the file.
func (f *nodeFlags) options(cmd *cobra.Command) (nodespec.Options, error) {
	var (
		name string
		text []byte
		err  error
	)

	if f.config != "" {
		if name, text, err = readConfig(cmd.InOrStdin(), f.config); err != nil {
			return nodespec.Options{}, fmt.Errorf("read configuration: %w", err)
		}
	}

	c, err := parseFile(name, text)
	if err != nil {
		return nodespec.Options{}, err
	}

	printProblems(cmd, name, c.Warnings)

	service, _ := serviceOptions(c.Environment) // was validated
	if cmd.Flags().Changed("provider-id-fallback") {
		service.ProviderIDFallback = config.ProviderIDFallback(f.fallback)
	}

	options := ccm.NodeOptions(c, service.ProviderIDFallback)

	if !service.Enabled(nodecontroller.Name) {
		options.Selector, _ = rules.CompileSelector([]rules.SelectorTerm{{}}, nil) // matches nothing
		printProblems(cmd, name, []config.Problem{{Msg: nodecontroller.Name + " is off: talos-ccm would write to no Node", Warning: true}})
	}

	return options, nil
}

// read reads resources of the given kinds over the Talos API, or of all kinds for a file; or it reads the file.
func (o *renderOptions) read(cmd *cobra.Command, kinds machine.Kinds) (machine.Machine, error) {
	if o.node == "" {
		return o.readFile(cmd)
	}

	if o.output == formatMachine {
		kinds = kinds.WithFacts(machine.AllFacts)
	}

	reader, err := o.talos.open(cmd.Context(), kinds)
	if err != nil {
		return machine.Machine{}, fmt.Errorf("read machine %s: %w", o.node, err)
	}
	defer reader.close()

	m, err := reader.read(cmd.Context(), o.node)
	if err != nil {
		return machine.Machine{}, fmt.Errorf("read machine %s: %w", o.node, err)
	}

	return m, nil
}

// readFile reads the machine of a file. It prints a warning if another version wrote the file.
func (o *renderOptions) readFile(cmd *cobra.Command) (machine.Machine, error) {
	text, err := readInput(cmd.InOrStdin(), o.machine)
	if err != nil {
		return machine.Machine{}, fmt.Errorf("read machine: %w", err)
	}

	source := o.machine
	if source == "-" {
		source = "stdin"
	}

	m, otherVersion, err := preview.ReadMachine(text)
	if err == nil && m.Nodename == "" {
		err = errors.New("no nodename")
	}

	if err != nil {
		return machine.Machine{}, fmt.Errorf("read machine from %s: %w", source, err)
	}

	if otherVersion != "" {
		fmt.Fprintf(cmd.ErrOrStderr(), "Warning: talos-ccm %s wrote %s; talos-ccm %s ignores keys that it does not know\n", otherVersion, source, version.Version())
	}

	return m, nil
}

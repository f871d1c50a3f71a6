package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
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
	// renderTimeout bounds the time that a live machine has to answer.
	renderTimeout = 30 * time.Second
	// lookUpTimeout is the part of it that name service has: a second server is asked after 5 s, and where all are silent the cluster may know the name.
	lookUpTimeout = 12 * time.Second
	// maxPrinted bounds what is read of talosctl's output: a thousand machines print some 10 MB.
	maxPrinted = 256 << 20
)

// rendering is a call of `talos-ccm render`.
type rendering struct {
	config      string
	fallback    string
	machine     string
	node        string
	talosconfig string
	arch        string
	nodeIPs     []string
	output      string
}

func newRenderCommand() *cobra.Command {
	var r rendering

	cmd := &cobra.Command{
		Use:                   "render (--machine FILE|- | --node NAME|ADDRESS) [--config FILE]",
		Short:                 "Show what the Node of a machine would get, and which rule sets what",
		DisableFlagsInUseLine: true,
		Long: `render shows what talos-ccm would write to the Node of a machine, and which rule of the configuration sets what. It writes nothing, and needs no cluster.

The machine is either what talosctl has printed of one or more, as YAML or JSON:

  ` + preview.Command() + ` > machine.yaml

or a live one, which is asked over the Talos API.

The exit code is 1 if the configuration is not valid, the machine cannot be read, or the Node would stay uninitialized for now. Values that would be left
out are shown as problems, and are no failure.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return r.run(cmd) },
	}

	flags := cmd.Flags()
	flags.StringVar(&r.config, "config", "", "The configuration file, or - for standard input. Without it there are no rules.")
	flags.StringVar(&r.machine, "machine", "", "What talosctl has printed: a file, or - for standard input.")
	flags.StringVar(&r.node, "node", "", "A live machine: its address, or a name that name service or a machine of the cluster knows.")
	flags.StringVar(&r.talosconfig, "talosconfig", "", "For --node: the talosconfig. (default $TALOSCONFIG, or ~/.talos/config)")
	flags.StringVar(&r.arch, "arch", "", "The Node's architecture, such as amd64, which its kubelet would say.")
	flags.StringSliceVar(&r.nodeIPs, "node-ip", nil, "The kubelet's node IPs. Without them they are those that Talos gives it.")
	flags.StringVar(&r.fallback, "provider-id-fallback", string(config.FallbackUUID), "As the flag of talos-ccm itself, unless the configuration says otherwise: uuid or node-ip.")
	flags.StringVarP(&r.output, "output", "o", preview.Formats()[0], "One of "+strings.Join(preview.Formats(), ", ")+".")

	cmd.MarkFlagsOneRequired("machine", "node")
	cmd.MarkFlagsMutuallyExclusive("machine", "node")

	return cmd
}

func (r rendering) run(cmd *cobra.Command) error {
	options, err := r.options(cmd.InOrStdin())
	if err != nil {
		return err
	}

	kubelet, err := r.kubelet()
	if err != nil {
		return err
	}

	machines, err := r.machines(cmd)
	if err != nil {
		return err
	}

	if len(machines) > 1 && len(kubelet.NodeIPs) > 0 {
		return errors.New("--node-ip is for one machine, and there are several")
	}

	reports := preview.Render(machines, kubelet, options)
	if err := preview.Write(cmd.OutOrStdout(), r.output, reports); err != nil {
		return err
	}

	return pending(reports)
}

// pending is an error if there are Nodes that would stay uninitialized.
func pending(reports []preview.Report) error {
	var nodes []string

	for _, report := range reports {
		if report.Pending != "" && !report.Unmanaged {
			nodes = append(nodes, report.Name)
		}
	}

	if len(nodes) > 0 {
		return fmt.Errorf("to stay uninitialized for now: %s", strings.Join(nodes, ", "))
	}

	return nil
}

// options are those that talos-ccm would work with.
func (r rendering) options(stdin io.Reader) (nodespec.Options, error) {
	if !slices.Contains([]string{string(config.FallbackUUID), string(config.FallbackNodeIP)}, r.fallback) {
		return nodespec.Options{}, fmt.Errorf("--provider-id-fallback: %q is neither %q nor %q", r.fallback, config.FallbackUUID, config.FallbackNodeIP)
	}

	if r.config == "-" && r.machine == "-" {
		return nodespec.Options{}, errors.New("only one of --config and --machine can be standard input")
	}

	var (
		name string
		text []byte
	)

	if r.config != "" {
		var err error
		if name, text, err = readConfig(stdin, r.config); err != nil {
			return nodespec.Options{}, fmt.Errorf("read the configuration: %w", err)
		}
	}

	c, err := config.Parse(name, text)
	if err != nil {
		return nodespec.Options{}, err
	}

	return ccm.NodeOptions(c, config.ProviderIDFallback(r.fallback)), nil
}

func (r rendering) kubelet() (preview.Kubelet, error) {
	kubelet := preview.Kubelet{Architecture: r.arch}

	for _, text := range r.nodeIPs {
		ip, err := netip.ParseAddr(text)
		if err != nil {
			return preview.Kubelet{}, fmt.Errorf("--node-ip: %w", err)
		}

		kubelet.NodeIPs = append(kubelet.NodeIPs, ip)
	}

	return kubelet, nil
}

func (r rendering) machines(cmd *cobra.Command) ([]preview.Machine, error) {
	if r.node != "" {
		ctx, cancel := context.WithTimeout(cmd.Context(), renderTimeout)
		defer cancel()

		return r.live(ctx)
	}

	text, err := r.printed(cmd.InOrStdin())
	if err != nil {
		return nil, fmt.Errorf("read the machine: %w", err)
	}

	machines, err := preview.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("read the machine from %s: %w", r.machine, err)
	}

	noteMissing(cmd.ErrOrStderr(), machines)

	return machines, nil
}

func (r rendering) printed(stdin io.Reader) ([]byte, error) {
	source := stdin

	if r.machine != "-" {
		file, err := os.Open(r.machine)
		if err != nil {
			return nil, err
		}
		defer file.Close() //nolint:errcheck // only read

		source = file
	}

	text, err := io.ReadAll(io.LimitReader(source, maxPrinted+1))
	if err == nil && len(text) > maxPrinted {
		err = fmt.Errorf("it is longer than %d MiB", maxPrinted>>20)
	}

	return text, err
}

// noteMissing names the kinds that were not printed. A machine may have none of a kind, so that is no error.
func noteMissing(out io.Writer, machines []preview.Machine) {
	noted := false

	for _, m := range machines {
		if len(m.Missing) > 0 {
			fmt.Fprintf(out, "Note: of machine %s there is no resource of %s.\n", m.Node, strings.Join(m.Missing, ", "))

			noted = true
		}
	}

	if noted {
		fmt.Fprintf(out, "If it has any, what is shown may be wrong. This prints all that count:\n  %s\n", preview.Command())
	}
}

// live asks a machine itself.
func (r rendering) live(ctx context.Context) ([]preview.Machine, error) {
	path, err := r.talosconfigPath()
	if err != nil {
		return nil, err
	}

	creds := talosapi.Talosconfig{Path: path}

	addr, err := locate(ctx, creds, r.node)
	if err != nil {
		return nil, fmt.Errorf("find machine %s: %w", r.node, err)
	}

	state, err := talosapi.Dial(creds, addr)
	if err != nil {
		return nil, err
	}
	defer state.Close() //nolint:errcheck // nothing is lost

	m, err := readMachine(ctx, state)
	if err != nil {
		return nil, fmt.Errorf("read machine %s: %w", r.node, err)
	}

	return []preview.Machine{{Node: r.node, Machine: m}}, nil
}

// talosconfigPath is where talosctl finds it, too.
func (r rendering) talosconfigPath() (string, error) {
	if r.talosconfig != "" {
		return r.talosconfig, nil
	}

	if path := os.Getenv("TALOSCONFIG"); path != "" {
		return path, nil
	}

	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("find the talosconfig: %w", err)
	}

	return filepath.Join(home, ".talos", "config"), nil
}

// locate finds the address of a machine. A name that name service does not know may be that of a member of the cluster.
func locate(ctx context.Context, creds talosapi.Talosconfig, node string) (netip.Addr, error) {
	addr, err := lookUp(ctx, node)
	if err == nil {
		return addr, nil
	}

	endpoints, endpointsErr := endpointsOf(creds)
	errs := []error{err, endpointsErr}

	for _, endpoint := range endpoints {
		addr, err := memberAddress(ctx, creds, endpoint, node)
		if err == nil {
			return addr, nil
		}

		errs = append(errs, fmt.Errorf("ask %s: %w", endpoint, err))
	}

	return netip.Addr{}, errors.Join(errs...)
}

// lookUp resolves an address, which stands for itself, or a name.
func lookUp(ctx context.Context, host string) (netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, lookUpTimeout)
	defer cancel()

	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.Addr{}, err
	}

	return addrs[0].Unmap(), nil
}

func endpointsOf(creds talosapi.Talosconfig) ([]string, error) {
	content, err := os.ReadFile(creds.Path)
	if err != nil {
		return nil, fmt.Errorf("read talosconfig: %w", err)
	}

	parsed, err := clientconfig.FromBytes(content)
	if err != nil {
		return nil, fmt.Errorf("read talosconfig %s: %w", creds.Path, err)
	}

	current, ok := parsed.Contexts[parsed.Context]
	if !ok {
		return nil, fmt.Errorf("read talosconfig %s: it has no context %q", creds.Path, parsed.Context)
	}

	return current.Endpoints, nil
}

// memberAddress asks a machine of the cluster for the address of another, which it knows if discovery is on.
func memberAddress(ctx context.Context, creds talosapi.Talosconfig, endpoint, node string) (netip.Addr, error) {
	addr, err := lookUp(ctx, endpoint)
	if err != nil {
		return netip.Addr{}, err
	}

	state, err := talosapi.Dial(creds, addr)
	if err != nil {
		return netip.Addr{}, err
	}
	defer state.Close() //nolint:errcheck // nothing is lost

	members, err := safe.StateListAll[*cluster.Member](ctx, state)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("list members: %w", err)
	}

	for member := range members.All() {
		spec := member.TypedSpec()
		if (member.Metadata().ID() == node || spec.Hostname == node) && len(spec.Addresses) > 0 {
			return spec.Addresses[0], nil
		}
	}

	return netip.Addr{}, fmt.Errorf("it knows no member %s", node)
}

// readMachine lists each kind once. One that the machine's version of Talos does not have is empty (Talos answers PermissionDenied for it).
func readMachine(ctx context.Context, state talosapi.State) (machine.Machine, error) {
	var view machine.View

	for _, kind := range append(machine.WatchedKinds(), machine.PolledKinds()...) {
		list, err := state.List(ctx, kind)
		if err != nil && status.Code(err) != codes.PermissionDenied {
			return machine.Machine{}, fmt.Errorf("list %s: %w", kind.Type(), err)
		}

		view.ReplaceKind(kind, list.Items)
	}

	return view.Machine(), nil
}

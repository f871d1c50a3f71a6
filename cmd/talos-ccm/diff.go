package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/component-base/term"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/controlplane"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/status"
)

// maxReads limits the machines that are read at the same time, since an endpoint has little memory to forward requests.
const maxReads = 16

// otherTimeout limits the time to read a machine whose Node is not compared.
const otherTimeout = 5 * time.Second

const diffName = "diff"

// Exit codes of the diff command, as of diff and kubectl diff.
const (
	exitDifferent = 1
	exitTrouble   = 2
)

// errDifferent is the result of the diff command if talos-ccm would change a Node. It has no message.
var errDifferent = errors.New("talos-ccm would change Nodes")

type diffOptions struct {
	spec   nodeFlags
	talos  talosFlags
	kube   kubeFlags
	output string
}

// kubeFlags select the cluster, as kubectl's flags do.
type kubeFlags struct{ config, context string }

func (f *kubeFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.config, "kubeconfig", "", "Path of the kubeconfig. (default $KUBECONFIG or ~/.kube/config)")
	flags.StringVar(&f.context, "kube-context", "", "Context of the kubeconfig. (default: its current context)")
}

func newDiffCommand() *cobra.Command {
	var o diffOptions

	cmd := &cobra.Command{
		Use:                   diffName + " [NODE ...] [--config FILE] [flags]",
		Short:                 "Compare the Nodes of a cluster with what talos-ccm would write to them",
		DisableFlagsInUseLine: true,
		Long: `Compare the given Nodes, or all Nodes of a cluster, with what talos-ccm would write to them: the
providerID, addresses, labels, annotations and taints. The command writes nothing.

It reads the Nodes with a kubeconfig and their machines over the Talos API, as talosctl does:
through the endpoints of the talosconfig or, without endpoints, from each machine itself.

  talos-ccm diff --config config.yaml

The output also lists what the upstream Talos CCM has set according to the Nodes' managed fields,
and the holder of the lease.

The exit code is 0 if talos-ccm would change no Node, 1 if it would, and 2 if the comparison failed
or is incomplete: a machine cannot be read, or its metadata is missing.`,
		RunE: o.run,
	}

	flags := cmd.Flags()
	o.kube.add(flags)
	addChoice(cmd, &o.output, "output", "o", "Output format", preview.Formats()...)
	o.spec.add(cmd)
	o.talos.add(flags)

	return cmd
}

func (o *diffOptions) run(cmd *cobra.Command, args []string) error {
	ctx := cmd.Context()

	options, err := o.spec.options(cmd)
	if err != nil {
		return err
	}

	config, client, err := o.kube.connect()
	if err != nil {
		return err
	}

	options.Domains = controlplane.Domains(ctx, config)

	lease, err := readLease(ctx, client)
	if err != nil {
		return err
	}

	nodes, err := listNodes(ctx, client, args)
	if err != nil {
		return err
	}

	machines, err := o.readMachines(cmd, nodes, args, kindsOf(options))
	if err != nil {
		return err
	}

	reports, err := preview.Compare(nodes, machines, options)
	if err != nil {
		return err
	}

	reports = slices.DeleteFunc(reports, func(r preview.Report) bool { return len(args) > 0 && !slices.Contains(args, r.Name) })
	comparison := preview.Comparison{Lease: lease, Nodes: reports, Full: len(args) > 0}

	if err := preview.Write(cmd.OutOrStdout(), o.output, comparison); err != nil {
		return err
	}

	if pending := comparison.Pending(); len(pending) > 0 {
		return fmt.Errorf("nodes cannot be compared: %s", strings.Join(pending, ", "))
	}

	if len(comparison.Changed()) > 0 {
		return errDifferent
	}

	return nil
}

// connect reads the kubeconfig as kubectl does.
func (f *kubeFlags) connect() (*rest.Config, *kubernetes.Clientset, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = f.config

	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: f.context}).ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		err = fmt.Errorf("no cluster in %s; set --kubeconfig or KUBECONFIG", strings.Join(rules.GetLoadingPrecedence(), ", "))
	}

	if err != nil {
		return nil, nil, fmt.Errorf("read kubeconfig: %w", err)
	}

	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, nil, fmt.Errorf("create Kubernetes client: %w", err)
	}

	return config, client, nil
}

// listNodes returns all Nodes, and an error if a named one is missing.
func listNodes(ctx context.Context, client kubernetes.Interface, names []string) (nodes []*corev1.Node, err error) {
	list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}

	for i := range list.Items {
		nodes = append(nodes, &list.Items[i])
	}

	for _, name := range names {
		if !slices.ContainsFunc(nodes, func(node *corev1.Node) bool { return node.Name == name }) {
			return nil, fmt.Errorf("node %q not found", name)
		}
	}

	return nodes, nil
}

// leaseKey returns the namespace and the name of the lease.
func leaseKey() (namespace, name string, err error) {
	options, err := ccm.NewOptions()
	if err != nil {
		return "", "", err
	}

	election := options.Framework.Generic.LeaderElection

	return election.ResourceNamespace, election.ResourceName, nil
}

func readLease(ctx context.Context, client kubernetes.Interface) (preview.Lease, error) {
	namespace, name, err := leaseKey()
	if err != nil {
		return preview.Lease{}, err
	}

	lease, err := status.ReadLease(ctx, client, namespace, name)
	if err != nil {
		return preview.Lease{}, err
	}

	return preview.Lease{Name: namespace + "/" + name, Holder: ptr.Deref(lease.Spec.HolderIdentity, "")}, nil
}

// readMachines reads resources of the given kinds, and returns the machines of the Nodes that run Talos. With names, it reads
// the others only if a named one responds: for values that Nodes must not share, such as a providerID or an address.
func (o *diffOptions) readMachines(cmd *cobra.Command, nodes []*corev1.Node, names []string, kinds machine.Kinds) (*inventory.Inventory, error) {
	reader, err := o.talos.open(cmd.Context(), kinds)
	if err != nil {
		return nil, err
	}
	defer reader.close()

	var named, others []*corev1.Node

	for _, node := range nodes {
		switch {
		case !nodespec.IsTalos(node):
		case len(names) == 0 || slices.Contains(names, node.Name):
			named = append(named, node)
		default:
			others = append(others, node)
		}
	}

	machines := inventory.New(time.Now)
	readAll(cmd, reader, named, machines, machineTimeout)

	if slices.ContainsFunc(named, func(node *corev1.Node) bool { return machines.Get(node.Name).Condition == inventory.Current }) {
		readAll(cmd, reader, others, machines, otherTimeout)
	}

	return machines, nil
}

// readAll reads the machines of Nodes, and shows the progress on a terminal.
func readAll(cmd *cobra.Command, reader *machineReader, nodes []*corev1.Node, machines *inventory.Inventory, timeout time.Duration) {
	_, _, notTerminal := term.TerminalSize(cmd.ErrOrStderr())
	free, done := make(chan struct{}, maxReads), make(chan struct{})

	for _, node := range nodes {
		go func() {
			free <- struct{}{}

			readMachine(cmd.Context(), reader, node, machines, timeout)

			<-free

			done <- struct{}{}
		}()
	}

	for i := range nodes {
		if notTerminal == nil {
			fmt.Fprintf(cmd.ErrOrStderr(), "\rMachines read: %d of %d", i, len(nodes))
		}

		<-done
	}

	if notTerminal == nil && len(nodes) > 0 {
		fmt.Fprint(cmd.ErrOrStderr(), "\r\x1b[K") // clears the line
	}
}

// readMachine reads the machine of a Node at the first of its addresses at which the machine responds under the Node's name. The addresses share
// the timeout.
func readMachine(ctx context.Context, reader *machineReader, node *corev1.Node, machines *inventory.Inventory, timeout time.Duration) {
	var (
		reasons    []string
		responding string
	)

	addresses := nodespec.DialAddresses(node)

	for _, addr := range addresses {
		readCtx, cancel := context.WithTimeout(ctx, timeout/time.Duration(len(addresses)))
		m, err := reader.read(readCtx, addr.String())

		cancel()

		switch {
		case err != nil:
			reasons = append(reasons, fmt.Sprintf("read machine %s: %v", addr, err))
		case m.Nodename != node.Name:
			responding = m.Nodename
			reasons = append(reasons, fmt.Sprintf("machine at %s reports nodename %q", addr, m.Nodename))
		default:
			machines.Replace(node.Name, m)

			return
		}
	}

	switch reason := strings.Join(reasons, "; "); {
	case responding != "":
		machines.MarkMismatch(node.Name, responding, reason)
	case reason == "":
		machines.MarkUnreachable(node.Name, "node has no address to connect to")
	default:
		machines.MarkUnreachable(node.Name, reason)
	}
}

package controlplane

// The reader of the control plane that package controlplane had before the reflector read the facts. See agree in
// controlplane_test.go.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	genericcontrollermanager "k8s.io/controller-manager/app"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/internal/backoff"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const oldKCM = "kube-controller-manager"

// OldConfig configures an OldReader. All fields are required unless noted.
type OldConfig struct {
	// Kubernetes is the connection to the API server, and Client a client for it.
	Kubernetes *rest.Config
	Client     kubernetes.Interface
	// Nodes must not have been started before New.
	Nodes coreinformers.NodeInformer
	// Dial returns a talosapi.ControlPlane for the machine of each control-plane Node.
	Dial talosapi.DialFunc
	// LocalState is the state of this machine. Its kube-controller-manager configuration is read even while no Node has
	// the label of the control plane. Nil outside Talos.
	LocalState state.CoreState
	// Hosted contains the names and addresses of a control plane that has no machines in the cluster, according to the
	// operator. While no Node has the label of the control plane, no machine has to answer. Nil if the control plane has
	// machines.
	Hosted *csrpolicy.ClusterSubjects
	// ReadMembers reports whether Members is needed now. Nil means never.
	ReadMembers func() bool
	Clock       clock.Clock
}

// Reader keeps the facts up to date. Use New and Run.
type OldReader struct {
	cfg      OldConfig
	identity Value[csrpolicy.ClusterIdentity]
	network  Value[*Network]
	members  Value[*Members]

	// The last answer of each source; nil or absent if it has never answered. Only Run uses them.
	certificate, service, serviceCIDRs *csrpolicy.ClusterSubjects                    // certificate is of all API servers
	certificates                       map[netip.AddrPort]*csrpolicy.ClusterSubjects // by endpoint; see readAPIServers
	endpoints                          []netip.AddrPort
	machines                           map[string]machineFacts // by nodename
	labeled                            bool                    // a Node has the label of the control plane
	local                              string                  // nodename of the local machine; empty if unknown
	paused                             bool                    // it was logged that the identity is incomplete
}

// New returns a Reader that has read nothing yet.
func NewOld(cfg OldConfig) *OldReader {
	cfg.Nodes.Informer() // has the factory start it

	return &OldReader{cfg: cfg, members: Value[*Members]{current: &Members{}}}
}

// Identity returns the names and addresses for which no kubelet may get a certificate. Its Known becomes true once the
// API server has answered, and the local machine or more than half of the control-plane machines. A hosted control plane
// has no machines. A source that stops responding keeps its last answer.
func (r *OldReader) Identity() *Value[csrpolicy.ClusterIdentity] { return &r.identity }

// Network returns how the control plane is configured to assign addresses; nil before the first refresh.
func (r *OldReader) Network() *Value[*Network] { return &r.network }

// Members returns the members of the cluster as of the last refresh; none while Config.ReadMembers returns false.
func (r *OldReader) Members() *Value[*Members] { return &r.members }

// Run refreshes the facts until ctx ends. It returns at once if nothing has subscribed to them.
func (r *OldReader) Run(ctx context.Context) {
	if !r.identity.subscribed() && !r.network.subscribed() && !r.members.subscribed() {
		return
	}

	// Without the Nodes, control-plane machines would be missed.
	if !cache.WaitForNamedCacheSyncWithContext(ctx, r.cfg.Nodes.Informer().HasSynced) {
		return
	}

	delays := backoff.New(retryFirst, retryMax)

	for r.refresh(ctx) {
		pause, network := refreshInterval, r.network.Current()

		if r.identity.subscribed() && !r.identity.Current().Known || r.network.subscribed() && (network.Problem != "" || !network.IsMajority()) {
			pause = delays.Step()
		} else {
			delays = backoff.New(retryFirst, retryMax)
		}

		if !backoff.Sleep(ctx, r.cfg.Clock, pause) {
			return
		}
	}
}

// refresh reads every source once and publishes the facts. It returns false if ctx has ended.
func (r *OldReader) refresh(ctx context.Context) bool {
	var (
		group         sync.WaitGroup
		apiServersErr error
	)

	group.Go(func() { apiServersErr = r.readAPIServers(ctx) })

	serviceCIDRs, serviceCIDRsErr := readServiceCIDRs(ctx, r.cfg.Client)
	machineErrs := r.readMachines(ctx)

	group.Wait()

	if ctx.Err() != nil {
		return false // the errors say nothing about the sources
	}

	r.serviceCIDRs = cmp.Or(serviceCIDRs, r.serviceCIDRs)

	identity, logger := r.mergeIdentity(), klog.FromContext(ctx)
	if r.identity.set(identity) {
		logger.V(2).Info("Updated names and addresses of the cluster", "identity", identity)
	}

	r.network.set(r.mergeNetwork(serviceCIDRsErr, machineErrs))

	members := &Members{SeenBy: map[string]MemberList{}}

	for nodename, facts := range r.machines {
		if nodename != localMachine {
			members.ControlPlane++
		}

		if facts.members != nil {
			members.SeenBy[nodename] = facts.members
		}
	}

	r.members.set(members)

	err := utilerrors.NewAggregate(append(machineErrs, apiServersErr, serviceCIDRsErr))
	wasPaused := r.paused
	r.paused = !identity.Known && r.identity.subscribed()

	switch {
	case r.paused && !wasPaused:
		logger.Info("Cluster identity incomplete; CSR approval paused, retrying", "err", err)
	case wasPaused && !r.paused:
		logger.Info("Cluster identity complete; CSR approval resumed")
	case err != nil:
		logger.V(2).Info("Failed to read some facts about the control plane; using their last known values", "err", err)
	}

	return true
}

// mergeIdentity returns the last answers of all sources, in a fixed order: equal answers must compare as equal.
func (r *OldReader) mergeIdentity() csrpolicy.ClusterIdentity {
	var none csrpolicy.ClusterSubjects

	certificate, service, serviceCIDRs := ptr.Deref(r.certificate, none), ptr.Deref(r.service, none), ptr.Deref(r.serviceCIDRs, none)
	answered := !slices.Contains([]*csrpolicy.ClusterSubjects{r.certificate, r.service, r.serviceCIDRs}, nil)

	// The default domain is reserved whether or not the cluster uses it.
	domains := append(domainsIn(certificate.APIServerNames), machine.DefaultDomain)
	slices.Sort(domains)

	id := csrpolicy.ClusterIdentity{Domains: slices.Compact(domains), Stated: csrpolicy.ClusterSubjects{
		APIServerNames: certificate.APIServerNames,
		APIServerIPs:   slices.Concat(certificate.APIServerIPs, service.APIServerIPs),
		VIPs:           service.VIPs,
	}}

	for _, endpoint := range r.endpoints {
		id.APIServerPorts = append(id.APIServerPorts, int32(endpoint.Port()))
	}

	report := func(source string, subjects csrpolicy.ClusterSubjects) {
		id.Reported = append(id.Reported, csrpolicy.Report{Source: source, ClusterSubjects: subjects})
	}

	nodes, _ := r.cfg.Nodes.Lister().List(labels.Everything()) // a list from the cache cannot fail

	// The kubelets of Nodes in a ServiceCIDR must not have all their requests denied.
	for _, cidr := range serviceCIDRs.ServiceCIDRs {
		inCIDR := func(node *corev1.Node) bool { return slices.ContainsFunc(nodespec.DialAddresses(node), cidr.Contains) }
		if slices.ContainsFunc(nodes, inCIDR) {
			report("a ServiceCIDR that contains addresses of Nodes", csrpolicy.ClusterSubjects{ServiceCIDRs: []netip.Prefix{cidr}})
		} else {
			id.Stated.ServiceCIDRs = append(id.Stated.ServiceCIDRs, cidr)
		}
	}

	if r.cfg.Hosted != nil {
		report("the flags about the hosted control plane", *r.cfg.Hosted)
	}

	known := 0

	for _, nodename := range slices.Sorted(maps.Keys(r.machines)) {
		if subjects := r.machines[nodename].subjects; subjects != nil {
			known++

			report(fmt.Sprintf("machine %q", nodename), *subjects)
		}
	}

	hasServices := func(report csrpolicy.Report) bool { return len(report.ServiceCIDRs) > 0 }
	knowsMachines := r.machines[r.local].subjects != nil || 2*known > len(r.machines) || r.isHosted()
	id.Known = answered && knowsMachines && (len(id.Stated.ServiceCIDRs) > 0 || slices.ContainsFunc(id.Reported, hasServices))

	return id
}

// isHosted reports whether Config.Hosted replaces the data of control-plane machines.
func (r *OldReader) isHosted() bool { return r.cfg.Hosted != nil && !r.labeled }

func (r *OldReader) mergeNetwork(serviceCIDRsErr error, machineErrs []error) *Network {
	network := &Network{Machines: len(r.machines)}

	for _, nodename := range slices.Sorted(maps.Keys(r.machines)) {
		if config := r.machines[nodename].kcm; config != nil {
			network.KCMConfigs = append(network.KCMConfigs, *config)
		}
	}

	if r.serviceCIDRs != nil {
		network.ServiceCIDRs = r.serviceCIDRs.ServiceCIDRs
	}

	switch {
	case serviceCIDRsErr != nil:
		network.Problem = "Failed to " + serviceCIDRsErr.Error()
	case len(network.KCMConfigs) == 0 && !r.isHosted():
		network.Problem = "The configuration of kube-controller-manager is not known for any control-plane machine"

		for _, err := range machineErrs {
			network.Problem += "; " + err.Error()
		}
	}

	return network
}

// readAPIServers reads the API server's Service, and the serving certificates of the API servers at its endpoints and of
// the one that the client connects to. It keeps the last certificate of an API server that does not respond: nothing
// waits for one that is down.
func (r *OldReader) readAPIServers(ctx context.Context) error {
	service, listed, serviceErr := readService(ctx, r.cfg.Client)
	if serviceErr == nil {
		r.service, r.endpoints = service, listed
	}

	endpoints := append([]netip.AddrPort{{}}, r.endpoints...)
	answers, errs := make([]*csrpolicy.ClusterSubjects, len(endpoints)), make([]error, len(endpoints))

	var group sync.WaitGroup

	for i, endpoint := range endpoints {
		group.Go(func() { answers[i], errs[i] = readCertificate(ctx, r.cfg.Kubernetes, endpoint) })
	}

	group.Wait()

	known, all := r.certificates, &csrpolicy.ClusterSubjects{}
	r.certificates = map[netip.AddrPort]*csrpolicy.ClusterSubjects{}

	for i, endpoint := range endpoints {
		if subjects := cmp.Or(answers[i], known[endpoint]); subjects != nil {
			r.certificates[endpoint] = subjects
			all.APIServerNames = append(all.APIServerNames, subjects.APIServerNames...)
			all.APIServerIPs = append(all.APIServerIPs, subjects.APIServerIPs...)
		}
	}

	slices.Sort(all.APIServerNames)
	slices.SortFunc(all.APIServerIPs, netip.Addr.Compare)
	all.APIServerNames, all.APIServerIPs = slices.Compact(all.APIServerNames), slices.Compact(all.APIServerIPs)

	if len(r.certificates) > 0 {
		r.certificate = all
	}

	return errors.Join(serviceErr, errors.Join(errs...))
}

// addresses returns the entries that are a single address, with or without a prefix length.
func addresses(list []string) []netip.Addr {
	var found []netip.Addr

	for _, s := range list {
		if addr, err := netip.ParseAddr(s); err == nil {
			found = append(found, addr)
		} else if prefix, err := netip.ParsePrefix(s); err == nil && prefix.IsSingleIP() {
			found = append(found, prefix.Addr())
		}
	}

	return found
}

// machineFacts are the facts read from one machine; each is nil if it has not been read.
type machineFacts struct {
	subjects *csrpolicy.ClusterSubjects
	kcm      *KCMConfig
	// members is nil unless they were read in the last refresh.
	members MemberList
}

// readMachines reads all control-plane machines concurrently. It keeps the facts of a machine that does not respond, and
// drops the facts of a machine when its Node loses the label of the control plane. A Node that does not report Talos is
// skipped until its machine has been read once: the kubelet writes the operating system. It returns the errors in the
// order of the nodenames.
func (r *OldReader) readMachines(ctx context.Context) []error {
	known := r.machines
	r.machines = map[string]machineFacts{}

	nodes, _ := r.cfg.Nodes.Lister().List(labels.Everything()) // a list from the cache cannot fail
	nodes = slices.DeleteFunc(nodes, func(node *corev1.Node) bool { return !nodespec.IsControlPlane(node) })
	r.labeled = len(nodes) > 0

	nodes = slices.DeleteFunc(nodes, func(node *corev1.Node) bool {
		_, isKnown := known[node.Name]

		return !isKnown && !nodespec.IsTalos(node)
	})
	slices.SortFunc(nodes, func(a, b *corev1.Node) int { return strings.Compare(a.Name, b.Name) })

	switch {
	case r.isHosted():
		return nil
	case len(nodes) == 0 && r.cfg.LocalState == nil:
		return []error{errNoNode}
	case len(nodes) == 0:
		// The machine's names and addresses do not count before its Node has the label.
		facts := known[localMachine]
		err := facts.read(ctx, localMachine, r.cfg.LocalState)
		r.machines[localMachine] = machineFacts{kcm: facts.kcm}

		return []error{cmp.Or(err, errNoNode)}
	}

	if r.cfg.LocalState != nil {
		readCtx, cancel := context.WithTimeout(ctx, timeout)
		if nodename, err := safe.StateGetByID[*k8s.Nodename](readCtx, r.cfg.LocalState, k8s.NodenameID); err == nil {
			r.local = nodename.TypedSpec().Nodename
		}

		cancel()
	}

	var group sync.WaitGroup

	answers, errs := make([]machineFacts, len(nodes)), make([]error, len(nodes))

	for i, node := range nodes {
		group.Go(func() { answers[i], errs[i] = r.readNode(ctx, node, known[node.Name]) })
	}

	group.Wait()

	for i, node := range nodes {
		r.machines[node.Name] = answers[i]
	}

	return slices.DeleteFunc(errs, func(err error) bool { return err == nil })
}

// readNode reads the machine of a Node at the first of the Node's addresses where that machine responds, or the local
// machine without its address. A fact that cannot be read keeps its last value.
func (r *OldReader) readNode(ctx context.Context, node *corev1.Node, facts machineFacts) (machineFacts, error) {
	err := errors.New("no address known")
	facts.members = nil // only the members of this refresh count

	addrs := nodespec.DialAddresses(node)
	if node.Name == r.local {
		addrs = []netip.Addr{{}}
	}

	for _, addr := range addrs {
		if err = r.readMachine(ctx, node.Name, addr, &facts); err == nil {
			return facts, nil
		}
	}

	return facts, fmt.Errorf("read control-plane machine %s: %w", node.Name, err)
}

// readMachine updates the facts from the machine at an address, or from the local machine. The machine must report the
// nodename.
func (r *OldReader) readMachine(ctx context.Context, nodename string, addr netip.Addr, facts *machineFacts) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	st := r.cfg.LocalState

	if nodename != r.local {
		conn, err := r.cfg.Dial(ctx, nodename, addr)
		if err != nil {
			return err
		}
		defer conn.Close() //nolint:errcheck // only read

		if _, ok := conn.(talosapi.ControlPlane); !ok {
			return fmt.Errorf("address %s: node has lost the label of the control plane", addr)
		}

		st = conn
	}

	reported, err := safe.StateGetByID[*k8s.Nodename](ctx, st, k8s.NodenameID)

	switch {
	case err != nil:
		return fmt.Errorf("read nodename: %w", err)
	case reported.TypedSpec().Nodename != nodename:
		return fmt.Errorf("machine at address %s reports nodename %q", addr, reported.TypedSpec().Nodename)
	}

	if r.cfg.ReadMembers != nil && r.cfg.ReadMembers() {
		facts.members, err = listMembers(ctx, st)
	}

	return cmp.Or(facts.read(ctx, nodename, st), err)
}

// listMembers returns the members that a machine lists.
func listMembers(ctx context.Context, st state.CoreState) (MemberList, error) {
	list, err := safe.StateListAll[*cluster.Member](ctx, state.WrapCore(st))
	if err != nil {
		return nil, fmt.Errorf("list members of the cluster: %w", err)
	}

	members := MemberList{}

	for member := range list.All() {
		spec := member.TypedSpec()
		m := machine.Member{NodeID: spec.NodeID}

		if len(spec.Addresses) > 0 {
			m.Address = spec.Addresses[0]
		}

		members[member.Metadata().ID()] = m
	}

	return members, nil
}

// read updates the facts that it can read. The error is of the first fact that could not be read.
func (f *machineFacts) read(ctx context.Context, nodename string, st state.CoreState) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	// The CIDRs have the same field numbers in all versions of Talos. The arguments have not: they are read from the
	// static pod.
	config, err := safe.StateGetByID[*k8s.ControllerManagerConfig](ctx, st, k8s.ControllerManagerConfigID)
	if err != nil {
		return fmt.Errorf("read configuration of %s: %w", oldKCM, err)
	}

	kcm := KCMConfig{Nodename: nodename}

	if kcm.ClusterCIDRs, err = cidrset.ParsePrefixes(config.TypedSpec().PodCIDRs); err != nil {
		return fmt.Errorf("parse cluster CIDRs of %s: %w", oldKCM, err)
	}

	if kcm.ServiceCIDRs, err = cidrset.ParsePrefixes(config.TypedSpec().ServiceCIDRs); err != nil {
		return fmt.Errorf("parse service CIDRs of %s: %w", oldKCM, err)
	}

	subjects, subjectsErr := readSubjects(ctx, st)
	if subjectsErr == nil {
		subjects.PodCIDRs, subjects.ServiceCIDRs = kcm.ClusterCIDRs, kcm.ServiceCIDRs
		f.subjects = subjects
	}

	if config.TypedSpec().Enabled {
		pod, err := safe.StateGetByID[*k8s.StaticPod](ctx, st, k8s.ControllerManagerID)
		if err != nil {
			return fmt.Errorf("read static pod of %s: %w", oldKCM, err)
		}

		args, err := arguments(pod.TypedSpec().Pod)
		if err != nil {
			return fmt.Errorf("parse static pod of %s: %w", oldKCM, err)
		}

		kcm.setArguments(args)
	}

	f.kcm = &kcm

	return subjectsErr
}

// readSubjects returns the endpoint of the cluster as the machine resolves it, and the virtual IPs that the machine can
// hold.
func readSubjects(ctx context.Context, st state.CoreState) (*csrpolicy.ClusterSubjects, error) {
	subjects := &csrpolicy.ClusterSubjects{}

	endpoint, err := safe.StateGet[*k8s.Endpoint](ctx, st,
		k8s.NewEndpoint(k8s.ControlPlaneNamespaceName, k8s.ControlPlaneKubernetesEndpointsID).Metadata())
	if err != nil && !state.IsNotFoundError(err) {
		return nil, fmt.Errorf("read cluster endpoint: %w", err)
	}

	if err == nil {
		subjects.APIServerIPs, subjects.APIServerNames = endpoint.TypedSpec().Addresses, endpoint.TypedSpec().Hosts
	}

	excluded, err := safe.StateGetByID[*k8s.NodeIPConfig](ctx, st, k8s.KubeletID)
	if err != nil {
		return nil, fmt.Errorf("read subnets excluded from node IPs: %w", err)
	}

	// Virtual IPs are listed as single addresses, next to pod and service CIDRs (k8s.NodeIPConfigController).
	subjects.VIPs = addresses(excluded.TypedSpec().ExcludeSubnets)

	return subjects, nil
}

// arguments returns the command line of the container named kube-controller-manager.
func arguments(object map[string]any) ([]string, error) {
	var pod corev1.Pod
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object, &pod); err != nil {
		return nil, err
	}

	i := slices.IndexFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == oldKCM })
	if i < 0 {
		return nil, fmt.Errorf("no container named %s", oldKCM)
	}

	return slices.Concat(pod.Spec.Containers[i].Command, pod.Spec.Containers[i].Args), nil
}

// setArguments applies the command line of kube-controller-manager, which assigns pod CIDRs with
// --allocate-node-cidrs, which is off by default, and the controller, which is on by default. --node-cidr-mask-size is
// only for single-stack clusters.
func (c *KCMConfig) setArguments(args []string) {
	flags := pflag.NewFlagSet(oldKCM, pflag.ContinueOnError)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	allocate := flags.Bool("allocate-node-cidrs", false, "")
	controllers := flags.StringSlice("controllers", []string{"*"}, "")
	size := flags.Int("node-cidr-mask-size", 0, "")
	sizeIPv4 := flags.Int("node-cidr-mask-size-ipv4", 0, "")
	sizeIPv6 := flags.Int("node-cidr-mask-size-ipv6", 0, "")

	if err := flags.Parse(args); err != nil {
		c.AllocatesNodeCIDRs = true // unknown, so talos-ccm must not allocate

		return
	}

	for i, name := range *controllers {
		(*controllers)[i] = strings.ReplaceAll(name, "nodeipam", "node-ipam-controller")
	}

	c.AllocatesNodeCIDRs = *allocate && genericcontrollermanager.IsControllerEnabled("node-ipam-controller", nil, *controllers)

	if len(c.ClusterCIDRs) == 1 && c.ClusterCIDRs[0].Addr().Is4() {
		*sizeIPv4 = cmp.Or(*sizeIPv4, *size)
	} else if len(c.ClusterCIDRs) == 1 {
		*sizeIPv6 = cmp.Or(*sizeIPv6, *size)
	}

	c.MaskSizes = map[corev1.IPFamily]int{corev1.IPv4Protocol: *sizeIPv4, corev1.IPv6Protocol: *sizeIPv6}
	maps.DeleteFunc(c.MaskSizes, func(_ corev1.IPFamily, size int) bool { return size == 0 })
}

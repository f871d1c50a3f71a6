package controlplane

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
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
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	genericcontrollermanager "k8s.io/controller-manager/app"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
)

const (
	// serviceKubernetes is the Service of the API server, in namespace default.
	serviceKubernetes = "kubernetes"

	// domainPrefix begins the name of the API server within the cluster; the cluster domain follows.
	domainPrefix = "kubernetes.default.svc."

	kubeControllerManager = "kube-controller-manager"

	// nodeIPAM is the name of kube-controller-manager's controller that assigns pod CIDRs, and nodeIPAMAlias its name
	// in older versions.
	nodeIPAM      = "node-ipam-controller"
	nodeIPAMAlias = "nodeipam"

	// localMachine takes the place of a nodename in errors and messages. It cannot be the name of a Node.
	localMachine = "this machine"
)

var errNoNode = errors.New("no Talos Node has the label node-role.kubernetes.io/control-plane; " +
	"a hosted control plane needs --hosted-control-plane, and no Node with the label")

// Domains returns the domains of cluster DNS in the API server's serving certificate. It returns none if that certificate
// cannot be read or belongs to a proxy in front of the API server.
func Domains(ctx context.Context, config *rest.Config) []string {
	subjects, err := readCertificate(ctx, config, netip.AddrPort{})
	if err != nil {
		return nil
	}

	return domainsIn(subjects.APIServerNames)
}

// domainsIn returns the domains of cluster DNS under which the names contain the API server's name.
func domainsIn(names []string) (domains []string) {
	for _, name := range names {
		if domain, ok := strings.CutPrefix(strings.ToLower(name), domainPrefix); ok && domain != "" {
			domains = append(domains, domain)
		}
	}

	return domains
}

// readAPIServers reads the API server's Service, and the serving certificates of the API servers at its endpoints and of
// the one that the client connects to. It keeps the last certificate of an API server that does not respond: nothing
// waits for one that is down.
func (r *Reader) readAPIServers(ctx context.Context) error {
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

// readCertificate returns the subjects of the serving certificate of the API server at an endpoint, or of the one that
// config names if endpoint is invalid. It opens a new connection each time, because the certificate may have been
// replaced since other connections were opened.
func readCertificate(ctx context.Context, config *rest.Config, endpoint netip.AddrPort) (*csrpolicy.ClusterSubjects, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("parse API server URL: %w", err)
	}

	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil || tlsConfig == nil {
		return nil, fmt.Errorf("read API server certificate: %w", cmp.Or(err, errors.New("connection does not use TLS")))
	}

	address := net.JoinHostPort(server.Hostname(), cmp.Or(server.Port(), "443"))
	tlsConfig.ServerName = cmp.Or(tlsConfig.ServerName, server.Hostname())

	if endpoint.IsValid() {
		// The CA signs the kubelets' certificates, too, but none for this name.
		address, tlsConfig.ServerName = endpoint.String(), strings.TrimSuffix(domainPrefix, ".")
	}

	dial := config.Dial
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}

	conn, err := dial(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("read API server certificate: %w", err)
	}
	defer conn.Close() //nolint:errcheck // nothing was written

	tlsConn := tls.Client(conn, tlsConfig)
	if err := tlsConn.HandshakeContext(ctx); err != nil {
		return nil, fmt.Errorf("read API server certificate at %s: %w", address, err)
	}

	certificate := tlsConn.ConnectionState().PeerCertificates[0]
	if len(domainsIn(certificate.DNSNames)) == 0 {
		return nil, fmt.Errorf("read API server certificate: no DNS name starts with %q, so the cluster domain is unknown", domainPrefix)
	}

	subjects := &csrpolicy.ClusterSubjects{APIServerNames: certificate.DNSNames}

	for _, ip := range certificate.IPAddresses {
		addr, _ := netip.AddrFromSlice(ip) // 4 or 16 bytes
		subjects.APIServerIPs = append(subjects.APIServerIPs, addr)
	}

	return subjects, nil
}

// readService returns the addresses of the API server's Service and of its endpoints, and the endpoints with their ports.
func readService(ctx context.Context, client kubernetes.Interface) (*csrpolicy.ClusterSubjects, []netip.AddrPort, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	service, err := client.CoreV1().Services(metav1.NamespaceDefault).Get(ctx, serviceKubernetes, metav1.GetOptions{})
	if err != nil {
		return nil, nil, fmt.Errorf("get Service of the API server: %w", err)
	}

	endpoints, err := readEndpoints(ctx, client)
	if err != nil {
		return nil, nil, err
	}

	subjects := &csrpolicy.ClusterSubjects{VIPs: addresses(service.Spec.ClusterIPs)}
	for _, endpoint := range endpoints {
		subjects.APIServerIPs = append(subjects.APIServerIPs, endpoint.Addr())
	}

	return subjects, endpoints, nil
}

// readEndpoints returns the endpoints of the API server, which publishes one port. API servers write only one
// EndpointSlice. Other clients may create EndpointSlices with the label of the API server's Service.
func readEndpoints(ctx context.Context, client kubernetes.Interface) ([]netip.AddrPort, error) {
	byName := fields.OneTermEqualSelector(metav1.ObjectNameField, serviceKubernetes).String()

	endpointSlices, err := client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: byName})
	if err != nil {
		return nil, fmt.Errorf("list EndpointSlices of the API server: %w", err)
	}

	var endpoints []netip.AddrPort

	for _, slice := range endpointSlices.Items {
		port := uint16(443)
		if len(slice.Ports) > 0 {
			port = uint16(ptr.Deref(slice.Ports[0].Port, 443)) //nolint:gosec // the API server validates ports
		}

		for _, endpoint := range slice.Endpoints {
			for _, addr := range addresses(endpoint.Addresses) {
				endpoints = append(endpoints, netip.AddrPortFrom(addr, port))
			}
		}
	}

	return endpoints, nil
}

// readServiceCIDRs returns the CIDRs of the ServiceCIDR API; none in a cluster without it (before Kubernetes 1.33).
func readServiceCIDRs(ctx context.Context, client kubernetes.Interface) (*csrpolicy.ClusterSubjects, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	subjects := &csrpolicy.ClusterSubjects{}

	list, err := client.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return subjects, nil
	} else if err != nil {
		return nil, fmt.Errorf("list ServiceCIDRs: %w", err)
	}

	for i := range list.Items {
		cidrs, err := cidrset.ParsePrefixes(list.Items[i].Spec.CIDRs)
		if err != nil {
			return nil, fmt.Errorf("parse ServiceCIDR %s: %w", list.Items[i].Name, err)
		}

		subjects.ServiceCIDRs = append(subjects.ServiceCIDRs, cidrs...)
	}

	return subjects, nil
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

// KCMConfig is how kube-controller-manager assigns addresses on one control-plane machine.
type KCMConfig struct {
	// Nodename of the machine, or "this machine" while no Node has the label of the control plane.
	Nodename string
	// AllocatesNodeCIDRs is true if kube-controller-manager assigns pod CIDRs to Nodes.
	AllocatesNodeCIDRs bool
	// ClusterCIDRs and ServiceCIDRs are masked.
	ClusterCIDRs, ServiceCIDRs []netip.Prefix
	// MaskSizes are the prefix lengths of pod CIDRs, without those that are not configured.
	MaskSizes map[corev1.IPFamily]int
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
func (r *Reader) readMachines(ctx context.Context) []error {
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
func (r *Reader) readNode(ctx context.Context, node *corev1.Node, facts machineFacts) (machineFacts, error) {
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
func (r *Reader) readMachine(ctx context.Context, nodename string, addr netip.Addr, facts *machineFacts) error {
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
		m := Member{NodeID: spec.NodeID}

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
		return fmt.Errorf("read configuration of %s: %w", kubeControllerManager, err)
	}

	kcm := KCMConfig{Nodename: nodename}

	if kcm.ClusterCIDRs, err = cidrset.ParsePrefixes(config.TypedSpec().PodCIDRs); err != nil {
		return fmt.Errorf("parse cluster CIDRs of %s: %w", kubeControllerManager, err)
	}

	if kcm.ServiceCIDRs, err = cidrset.ParsePrefixes(config.TypedSpec().ServiceCIDRs); err != nil {
		return fmt.Errorf("parse service CIDRs of %s: %w", kubeControllerManager, err)
	}

	subjects, subjectsErr := readSubjects(ctx, st)
	if subjectsErr == nil {
		subjects.PodCIDRs, subjects.ServiceCIDRs = kcm.ClusterCIDRs, kcm.ServiceCIDRs
		f.subjects = subjects
	}

	if config.TypedSpec().Enabled {
		pod, err := safe.StateGetByID[*k8s.StaticPod](ctx, st, k8s.ControllerManagerID)
		if err != nil {
			return fmt.Errorf("read static pod of %s: %w", kubeControllerManager, err)
		}

		args, err := arguments(pod.TypedSpec().Pod)
		if err != nil {
			return fmt.Errorf("parse static pod of %s: %w", kubeControllerManager, err)
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

	i := slices.IndexFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == kubeControllerManager })
	if i < 0 {
		return nil, fmt.Errorf("no container named %s", kubeControllerManager)
	}

	return slices.Concat(pod.Spec.Containers[i].Command, pod.Spec.Containers[i].Args), nil
}

// setArguments applies the command line of kube-controller-manager, which assigns pod CIDRs with
// --allocate-node-cidrs, which is off by default, and the controller, which is on by default. --node-cidr-mask-size is
// only for single-stack clusters.
func (c *KCMConfig) setArguments(args []string) {
	flags := pflag.NewFlagSet(kubeControllerManager, pflag.ContinueOnError)
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
		(*controllers)[i] = strings.ReplaceAll(name, nodeIPAMAlias, nodeIPAM)
	}

	c.AllocatesNodeCIDRs = *allocate && genericcontrollermanager.IsControllerEnabled(nodeIPAM, nil, *controllers)

	if len(c.ClusterCIDRs) == 1 && c.ClusterCIDRs[0].Addr().Is4() {
		*sizeIPv4 = cmp.Or(*sizeIPv4, *size)
	} else if len(c.ClusterCIDRs) == 1 {
		*sizeIPv6 = cmp.Or(*sizeIPv6, *size)
	}

	c.MaskSizes = map[corev1.IPFamily]int{corev1.IPv4Protocol: *sizeIPv4, corev1.IPv6Protocol: *sizeIPv6}
	maps.DeleteFunc(c.MaskSizes, func(_ corev1.IPFamily, size int) bool { return size == 0 })
}

package clusteridentity

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

const (
	// labelControlPlane is set by Talos with an administrator's certificate; the admission plugin NodeRestriction keeps kubelets from it.
	labelControlPlane = "node-role.kubernetes.io/control-plane"

	// serviceKubernetes is the API server's Service, in namespace default.
	serviceKubernetes = "kubernetes"

	// domainPrefix begins the API server's name within the cluster; the cluster's domain follows.
	domainPrefix = "kubernetes.default.svc."
)

// IsControlPlane tells whether the Node is known to be of the control plane. A machine can say so of itself as it likes.
func IsControlPlane(node *corev1.Node) bool {
	_, labeled := node.Labels[labelControlPlane]

	return labeled
}

// fromCertificate returns what the API server's serving certificate is for. It connects anew each time, for the server may have another
// certificate than when our other connections were made.
func fromCertificate(ctx context.Context, config *rest.Config) (csrpolicy.ClusterIdentity, error) {
	var id csrpolicy.ClusterIdentity

	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return id, fmt.Errorf("parse the API server's URL: %w", err)
	}

	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil || tlsConfig == nil {
		return id, fmt.Errorf("read the API server's certificate: %w", cmp.Or(err, errors.New("the connection is not by TLS")))
	}

	dialer := tls.Dialer{Config: tlsConfig}

	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(server.Hostname(), cmp.Or(server.Port(), "443")))
	if err != nil {
		return id, fmt.Errorf("read the API server's certificate: %w", err)
	}
	defer conn.Close() //nolint:errcheck // nothing was written

	secured, ok := conn.(*tls.Conn)
	if !ok {
		return id, fmt.Errorf("read the API server's certificate: %T is no TLS connection", conn)
	}

	certificate := secured.ConnectionState().PeerCertificates[0]
	id.APIServerNames = certificate.DNSNames

	for _, ip := range certificate.IPAddresses {
		if addr, ok := netip.AddrFromSlice(ip); ok {
			id.APIServerIPs = append(id.APIServerIPs, addr)
		}
	}

	for _, name := range certificate.DNSNames {
		if domain, ok := strings.CutPrefix(strings.ToLower(name), domainPrefix); ok && domain != "" {
			id.Domains = append(id.Domains, domain)
		}
	}

	if len(id.Domains) == 0 {
		return id, errors.New("read the API server's certificate: it names no cluster domain")
	}

	return id, nil
}

// fromObjects returns what Kubernetes' own objects say.
func fromObjects(ctx context.Context, client kubernetes.Interface) (csrpolicy.ClusterIdentity, error) {
	var id csrpolicy.ClusterIdentity

	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	service, err := client.CoreV1().Services(metav1.NamespaceDefault).Get(ctx, serviceKubernetes, metav1.GetOptions{})
	if err != nil {
		return id, fmt.Errorf("read the service of the API server: %w", err)
	}

	id.ServiceIPs = addresses(service.Spec.ClusterIPs)

	slicesOf := metav1.ListOptions{LabelSelector: labels.Set{discoveryv1.LabelServiceName: serviceKubernetes}.String()}

	endpoints, err := client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).List(ctx, slicesOf)
	if err != nil {
		return id, fmt.Errorf("read the endpoints of the API server: %w", err)
	}

	for i := range endpoints.Items {
		for _, endpoint := range endpoints.Items[i].Endpoints {
			id.APIServerIPs = append(id.APIServerIPs, addresses(endpoint.Addresses)...)
		}
	}

	// Not there before Kubernetes 1.33.
	cidrs, err := client.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return id, fmt.Errorf("read the service CIDRs: %w", err)
	}

	if err == nil {
		for i := range cidrs.Items {
			id.ServiceCIDRs = append(id.ServiceCIDRs, prefixes(cidrs.Items[i].Spec.CIDRs)...)
		}
	}

	return id, nil
}

// fromMachines asks every control-plane machine. Of one that does not answer, the last answer remains.
func (g *Gatherer) fromMachines(ctx context.Context) (map[string]csrpolicy.ClusterIdentity, error) {
	nodes, err := g.cfg.Nodes.List(labels.Everything())
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}

	nodes = slices.DeleteFunc(nodes, func(node *corev1.Node) bool { return !IsControlPlane(node) || !nodespec.IsTalos(node) })

	var (
		group   sync.WaitGroup
		mu      sync.Mutex
		errs    []error
		answers = map[string]csrpolicy.ClusterIdentity{}
	)

	for _, node := range nodes {
		group.Go(func() {
			answer, err := g.fromMachine(ctx, node)

			mu.Lock()
			defer mu.Unlock()

			if err != nil {
				errs = append(errs, fmt.Errorf("ask control-plane machine %s: %w", node.Name, err))
			} else {
				answers[node.Name] = answer
			}
		})
	}

	group.Wait()

	g.mu.Lock()
	defer g.mu.Unlock()

	for _, node := range nodes {
		if _, answered := answers[node.Name]; !answered {
			if last, known := g.machines[node.Name]; known {
				answers[node.Name] = last
			}
		}
	}

	if len(answers) == 0 && len(errs) == 0 {
		errs = append(errs, errors.New("ask the control-plane machines: no Talos node has the label "+labelControlPlane+" yet"))
	}

	return answers, errors.Join(errs...)
}

func (g *Gatherer) fromMachine(ctx context.Context, node *corev1.Node) (csrpolicy.ClusterIdentity, error) {
	err := errors.New("the node has no address")

	for _, addr := range nodespec.DialAddresses(node) {
		var answer csrpolicy.ClusterIdentity
		if answer, err = g.ask(ctx, node.Name, addr); err == nil {
			return answer, nil
		}
	}

	return csrpolicy.ClusterIdentity{}, err
}

func (g *Gatherer) ask(ctx context.Context, nodename string, addr netip.Addr) (csrpolicy.ClusterIdentity, error) {
	var id csrpolicy.ClusterIdentity

	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	st, err := g.cfg.Dial(nodename, addr)
	if err != nil {
		return id, err
	}
	defer st.Close() //nolint:errcheck // only read

	name, err := safe.StateGetByID[*k8s.Nodename](ctx, st, k8s.NodenameID)
	if err != nil {
		return id, fmt.Errorf("read the nodename at %s: %w", addr, err)
	}

	if name.TypedSpec().Nodename != nodename {
		return id, fmt.Errorf("at %s is %q", addr, name.TypedSpec().Nodename)
	}

	manager, err := safe.StateGetByID[*k8s.ControllerManagerConfig](ctx, st, k8s.ControllerManagerConfigID)
	if err != nil {
		return id, fmt.Errorf("read the configuration of kube-controller-manager: %w", err)
	}

	id.PodCIDRs = prefixes(manager.TypedSpec().PodCIDRs)
	id.ServiceCIDRs = prefixes(manager.TypedSpec().ServiceCIDRs)

	// The cluster's endpoint, as the machine resolves it.
	endpoint, err := safe.StateGet[*k8s.Endpoint](ctx, st,
		k8s.NewEndpoint(k8s.ControlPlaneNamespaceName, k8s.ControlPlaneKubernetesEndpointsID).Metadata())
	if err != nil && !state.IsNotFoundError(err) {
		return id, fmt.Errorf("read the cluster's endpoint: %w", err)
	}

	if err == nil {
		id.APIServerIPs, id.APIServerNames = endpoint.TypedSpec().Addresses, endpoint.TypedSpec().Hosts
	}

	excluded, err := safe.StateGetByID[*k8s.NodeIPConfig](ctx, st, k8s.KubeletID)
	if err != nil {
		return id, fmt.Errorf("read the subnets excluded as node IPs: %w", err)
	}

	// Virtual addresses are listed without a length, next to pod and service CIDRs (k8s/NodeIPConfigController).
	id.VIPs = addresses(excluded.TypedSpec().ExcludeSubnets)

	return id, nil
}

// addresses are those of list that are single addresses.
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

// prefixes are those of list that are prefixes.
func prefixes(list []string) []netip.Prefix {
	var found []netip.Prefix

	for _, s := range list {
		if prefix, err := netip.ParsePrefix(s); err == nil {
			found = append(found, prefix.Masked())
		}
	}

	return found
}

// add puts all that part says to all.
func add(all *csrpolicy.ClusterIdentity, part csrpolicy.ClusterIdentity) {
	all.Domains = append(all.Domains, part.Domains...)
	all.APIServerNames = append(all.APIServerNames, part.APIServerNames...)
	all.APIServerIPs = append(all.APIServerIPs, part.APIServerIPs...)
	all.ServiceIPs = append(all.ServiceIPs, part.ServiceIPs...)
	all.ServiceCIDRs = append(all.ServiceCIDRs, part.ServiceCIDRs...)
	all.PodCIDRs = append(all.PodCIDRs, part.PodCIDRs...)
	all.VIPs = append(all.VIPs, part.VIPs...)
}

// normal is id in an order of its own and without repetition, so that two that say the same are equal.
func normal(id csrpolicy.ClusterIdentity) csrpolicy.ClusterIdentity {
	id.Domains = distinct(id.Domains, cmp.Compare)
	id.APIServerNames = distinct(id.APIServerNames, cmp.Compare)
	id.APIServerIPs = distinct(id.APIServerIPs, netip.Addr.Compare)
	id.ServiceIPs = distinct(id.ServiceIPs, netip.Addr.Compare)
	id.ServiceCIDRs = distinct(id.ServiceCIDRs, netip.Prefix.Compare)
	id.PodCIDRs = distinct(id.PodCIDRs, netip.Prefix.Compare)
	id.VIPs = distinct(id.VIPs, netip.Addr.Compare)

	return id
}

func distinct[T comparable](list []T, compare func(a, b T) int) []T {
	slices.SortFunc(list, compare)

	return slices.Compact(list)
}

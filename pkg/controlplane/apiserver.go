package controlplane

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

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
)

const (
	// serviceKubernetes is the Service of the API server, in namespace default.
	serviceKubernetes = "kubernetes"

	// domainPrefix begins the name of the API server within the cluster; the cluster domain follows.
	domainPrefix = "kubernetes.default.svc."
)

// apiServer has the last answer of each source at the API server; nil if it has never answered.
type apiServer struct {
	certificate, service, serviceCIDRs *csrpolicy.ClusterSubjects                    // certificate is of all API servers
	certificates                       map[netip.AddrPort]*csrpolicy.ClusterSubjects // by endpoint
	endpoints                          []netip.AddrPort

	// err is why the last read failed, and serviceCIDRsErr the part of it that is about the ServiceCIDRs.
	err, serviceCIDRsErr error
}

func (a *apiServer) read(ctx context.Context, config *rest.Config, client kubernetes.Interface) {
	var (
		group           sync.WaitGroup
		certificatesErr error
	)

	group.Go(func() { certificatesErr = a.readCertificates(ctx, config, client) })

	var serviceCIDRs *csrpolicy.ClusterSubjects

	serviceCIDRs, a.serviceCIDRsErr = readServiceCIDRs(ctx, client)
	a.serviceCIDRs = cmp.Or(serviceCIDRs, a.serviceCIDRs)

	group.Wait()

	a.err = utilerrors.NewAggregate([]error{certificatesErr, a.serviceCIDRsErr})
}

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

// readCertificates reads the API server's Service, and the serving certificates of the API servers at its endpoints and of
// the one that the client connects to. It keeps the last certificate of an API server that does not respond: nothing
// waits for one that is down.
func (a *apiServer) readCertificates(ctx context.Context, config *rest.Config, client kubernetes.Interface) error {
	service, listed, serviceErr := readService(ctx, client)
	if serviceErr == nil {
		a.service, a.endpoints = service, listed
	}

	endpoints := append([]netip.AddrPort{{}}, a.endpoints...)
	answers, errs := make([]*csrpolicy.ClusterSubjects, len(endpoints)), make([]error, len(endpoints))

	var group sync.WaitGroup

	for i, endpoint := range endpoints {
		group.Go(func() { answers[i], errs[i] = readCertificate(ctx, config, endpoint) })
	}

	group.Wait()

	known, all := a.certificates, &csrpolicy.ClusterSubjects{}
	a.certificates = map[netip.AddrPort]*csrpolicy.ClusterSubjects{}

	for i, endpoint := range endpoints {
		if subjects := cmp.Or(answers[i], known[endpoint]); subjects != nil {
			a.certificates[endpoint] = subjects
			all.APIServerNames = append(all.APIServerNames, subjects.APIServerNames...)
			all.APIServerIPs = append(all.APIServerIPs, subjects.APIServerIPs...)
		}
	}

	slices.Sort(all.APIServerNames)
	slices.SortFunc(all.APIServerIPs, netip.Addr.Compare)
	all.APIServerNames, all.APIServerIPs = slices.Compact(all.APIServerNames), slices.Compact(all.APIServerIPs)

	if len(a.certificates) > 0 {
		a.certificate = all
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

	subjects := &csrpolicy.ClusterSubjects{VIPs: machine.SingleAddresses(service.Spec.ClusterIPs)}
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
			for _, addr := range machine.SingleAddresses(endpoint.Addresses) {
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

package controlplane

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/talos-ccm/talos-ccm/pkg/cidrset"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
)

const (
	// serviceKubernetes is the Service of the API server, in namespace default.
	serviceKubernetes = "kubernetes"

	// domainPrefix begins the name of the API server within the cluster; the cluster domain follows.
	domainPrefix = "kubernetes.default.svc."
)

// readCertificate returns the subjects of the API server's serving certificate. It opens a new connection each time,
// because the certificate may have been replaced since other connections were opened.
func readCertificate(ctx context.Context, config *rest.Config) (*csrpolicy.ClusterIdentity, error) {
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

	dialer := tls.Dialer{Config: tlsConfig}

	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(server.Hostname(), cmp.Or(server.Port(), "443")))
	if err != nil {
		return nil, fmt.Errorf("read API server certificate: %w", err)
	}
	defer conn.Close() //nolint:errcheck // nothing was written

	tlsConn, ok := conn.(*tls.Conn)
	if !ok {
		return nil, fmt.Errorf("read API server certificate: unexpected connection type %T", conn)
	}

	certificate := tlsConn.ConnectionState().PeerCertificates[0]
	id := &csrpolicy.ClusterIdentity{APIServerNames: certificate.DNSNames}

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
		return nil, fmt.Errorf("read API server certificate: no DNS name starts with %q, so the cluster domain is unknown", domainPrefix)
	}

	return id, nil
}

// readService returns the addresses of the API server's Service and of its endpoints.
func readService(ctx context.Context, client kubernetes.Interface) (*csrpolicy.ClusterIdentity, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	service, err := client.CoreV1().Services(metav1.NamespaceDefault).Get(ctx, serviceKubernetes, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("get Service of the API server: %w", err)
	}

	id := &csrpolicy.ClusterIdentity{ServiceIPs: addresses(service.Spec.ClusterIPs)}
	ofService := metav1.ListOptions{LabelSelector: labels.Set{discoveryv1.LabelServiceName: serviceKubernetes}.String()}

	endpointSlices, err := client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).List(ctx, ofService)
	if err != nil {
		return nil, fmt.Errorf("list EndpointSlices of the API server: %w", err)
	}

	for i := range endpointSlices.Items {
		for _, endpoint := range endpointSlices.Items[i].Endpoints {
			id.APIServerIPs = append(id.APIServerIPs, addresses(endpoint.Addresses)...)
		}
	}

	return id, nil
}

// readServiceCIDRs returns the CIDRs of the ServiceCIDR API; none in a cluster without it (before Kubernetes 1.33).
func readServiceCIDRs(ctx context.Context, client kubernetes.Interface) (*csrpolicy.ClusterIdentity, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	id := &csrpolicy.ClusterIdentity{}

	list, err := client.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return id, nil
	} else if err != nil {
		return nil, fmt.Errorf("list ServiceCIDRs: %w", err)
	}

	for i := range list.Items {
		cidrs, err := cidrset.ParsePrefixes(list.Items[i].Spec.CIDRs)
		if err != nil {
			return nil, fmt.Errorf("parse ServiceCIDR %s: %w", list.Items[i].Name, err)
		}

		id.ServiceCIDRs = append(id.ServiceCIDRs, cidrs...)
	}

	return id, nil
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

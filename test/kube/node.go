package kube

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509/pkix"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"

	"github.com/siderolabs/gen/xslices"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	applycoordinationv1 "k8s.io/client-go/applyconfigurations/coordination/v1"
	certificatesv1client "k8s.io/client-go/kubernetes/typed/certificates/v1"
	coordinationv1client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	certutil "k8s.io/client-go/util/cert"
	cloudproviderapi "k8s.io/cloud-provider/api"
)

// DefaultOSImage is that of a Talos v1.13.5 machine.
const DefaultOSImage = "Talos (v1.13.5)"

// NodeSpec describes a Node as its kubelet registers it.
type NodeSpec struct {
	// Name is the Node's name and hostname.
	Name string
	// NodeIPs are the kubelet's --node-ip: at most one per family. Without any, the Node has only its hostname as an
	// address, and no provided-node-ip annotation.
	NodeIPs []netip.Addr
	// OSImage defaults to DefaultOSImage.
	OSImage string
	// ProviderID is that of the kubelet's configuration; usually empty.
	ProviderID string
	// Labels and Taints come on top of those that every kubelet sets. NodeRestriction refuses some labels.
	Labels map[string]string
	Taints []corev1.Taint
	// ControlPlane adds the label of control-plane Nodes after the registration, as Talos does, with an administrator's
	// certificate.
	ControlPlane bool
	// WithoutCloudProvider is a kubelet without --cloud-provider=external: no uninitialized taint, no provided-node-ip.
	WithoutCloudProvider bool
}

// RegisterNode registers a Node that no kubelet stands behind, in the state in which the kubelet of a Talos machine with
// --cloud-provider=external registers it: tainted as uninitialized, with the provided node IPs as annotation and as
// addresses.
//
// The request is sent with [Cluster.KubeletConfig], so that authorization and admission treat it as the kubelet's.
func (c *Cluster) RegisterNode(ctx context.Context, spec NodeSpec) (*corev1.Node, error) {
	kubelet := corev1client.NewForConfigOrDie(c.KubeletConfig(spec.Name)) // clients of all groups cost a millisecond

	node, err := kubelet.Nodes().Create(ctx, spec.node(), metav1.CreateOptions{})
	if err == nil && spec.ControlPlane {
		label := []byte(`{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`)
		node, err = corev1client.NewForConfigOrDie(c.Config()).Nodes().Patch(ctx, spec.Name, types.MergePatchType, label, metav1.PatchOptions{})
	}

	if err != nil {
		return nil, fmt.Errorf("register node %s: %w", spec.Name, err)
	}

	return node, nil
}

// RenewLease creates or renews the Lease of a kubelet.
func (c *Cluster) RenewLease(ctx context.Context, nodename string) error {
	lease := applycoordinationv1.Lease(nodename, corev1.NamespaceNodeLease).WithSpec(applycoordinationv1.LeaseSpec().
		WithHolderIdentity(nodename).WithLeaseDurationSeconds(40).WithRenewTime(metav1.NowMicro()))
	client := coordinationv1client.NewForConfigOrDie(c.KubeletConfig(nodename))

	if _, err := client.Leases(corev1.NamespaceNodeLease).Apply(ctx, lease, metav1.ApplyOptions{FieldManager: kubelet, Force: true}); err != nil {
		return fmt.Errorf("renew lease of %s: %w", nodename, err)
	}

	return nil
}

// RequestServingCertificate creates a CSR for DNS names and IP addresses as the kubelet of a Node does
// (k8s.io/kubernetes/pkg/kubelet/certificate). The key is discarded. If name is empty, the API server chooses one.
func (c *Cluster) RequestServingCertificate(ctx context.Context, nodename, name string, subjects ...string) (*certificatesv1.CertificateSigningRequest, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}

	var (
		user  = pkix.Name{CommonName: userNode + nodename, Organization: []string{groupNodes}}
		names []string
		ips   []net.IP
	)

	for _, subject := range subjects {
		if ip := net.ParseIP(subject); ip != nil {
			ips = append(ips, ip)
		} else {
			names = append(names, subject)
		}
	}

	request, err := certutil.MakeCSR(key, &user, names, ips)
	if err != nil {
		return nil, fmt.Errorf("make CSR of %s: %w", nodename, err)
	}

	client := certificatesv1client.NewForConfigOrDie(c.KubeletConfig(nodename))

	return client.CertificateSigningRequests().Create(ctx, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name, GenerateName: "csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: request, SignerName: certificatesv1.KubeletServingSignerName,
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
		},
	}, metav1.CreateOptions{})
}

func (s NodeSpec) node() *corev1.Node {
	capacity := corev1.ResourceList{
		corev1.ResourceCPU:    resource.MustParse("4"),
		corev1.ResourceMemory: resource.MustParse("8Gi"),
		corev1.ResourcePods:   resource.MustParse("110"),
	}
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: s.Name,
			Labels: map[string]string{
				corev1.LabelHostname:      s.Name,
				corev1.LabelOSStable:      runtime.GOOS,
				corev1.LabelArchStable:    runtime.GOARCH,
				"beta.kubernetes.io/os":   runtime.GOOS,
				"beta.kubernetes.io/arch": runtime.GOARCH,
			},
			Annotations: map[string]string{"volumes.kubernetes.io/controller-managed-attach-detach": "true"},
		},
		Spec: corev1.NodeSpec{ProviderID: s.ProviderID, Taints: slices.Clone(s.Taints)},
		Status: corev1.NodeStatus{
			Capacity:    capacity,
			Allocatable: capacity,
			// Those of a machine without a CNI: healthy but not Ready, as a Node is when a cloud controller manager
			// first sees it.
			Conditions: []corev1.NodeCondition{
				isFalse(corev1.NodeMemoryPressure, "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
				isFalse(corev1.NodeDiskPressure, "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
				isFalse(corev1.NodePIDPressure, "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
				isFalse(corev1.NodeReady, "KubeletNotReady", "container runtime network not ready: cni plugin not initialized"),
			},
			NodeInfo: corev1.NodeSystemInfo{
				OSImage:                 cmp.Or(s.OSImage, DefaultOSImage),
				KubeletVersion:          KubernetesVersion,
				OperatingSystem:         runtime.GOOS,
				Architecture:            runtime.GOARCH,
				ContainerRuntimeVersion: "containerd://2.2.5",
			},
		},
	}

	maps.Copy(node.Labels, s.Labels)

	for _, ip := range s.NodeIPs {
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip.String()})
	}

	node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: s.Name})

	if s.WithoutCloudProvider {
		return node
	}

	node.Spec.Taints = append(node.Spec.Taints,
		corev1.Taint{Key: cloudproviderapi.TaintExternalCloudProvider, Value: "true", Effect: corev1.TaintEffectNoSchedule})

	if len(s.NodeIPs) > 0 {
		node.Annotations[cloudproviderapi.AnnotationAlphaProvidedIPAddr] = strings.Join(xslices.Map(s.NodeIPs, netip.Addr.String), ",")
	}

	return node
}

func isFalse(kind corev1.NodeConditionType, reason, message string) corev1.NodeCondition {
	now := metav1.Now()

	return corev1.NodeCondition{
		Type: kind, Status: corev1.ConditionFalse, Reason: reason, Message: message, LastHeartbeatTime: now, LastTransitionTime: now,
	}
}

package kube

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	// DefaultOSImage is that of a Talos v1.13.5 machine.
	DefaultOSImage = "Talos (v1.13.5)"
	// DefaultKubeletVersion is that of this package's Kubernetes.
	DefaultKubeletVersion = KubernetesVersion

	// uninitializedTaint and providedNodeIP are k8s.io/cloud-provider/api's.
	uninitializedTaint = "node.cloudprovider.kubernetes.io/uninitialized"
	providedNodeIP     = "alpha.kubernetes.io/provided-node-ip"
)

// NodeSpec describes a Node as its kubelet registers it.
type NodeSpec struct {
	// Name is the Node's name and, unless Hostname is set, its hostname.
	Name     string
	Hostname string
	// NodeIPs are the kubelet's --node-ip: at most one per family. Without any, the Node has only its hostname as an address, and no
	// provided-node-ip annotation.
	NodeIPs []netip.Addr
	// OSImage and KubeletVersion default to DefaultOSImage and DefaultKubeletVersion.
	OSImage        string
	KubeletVersion string
	// Labels, Annotations and Taints come on top of those that every kubelet sets. NodeRestriction refuses some labels, such as
	// node-role.kubernetes.io/control-plane, which Talos sets with an administrator's certificate.
	Labels      map[string]string
	Annotations map[string]string
	Taints      []corev1.Taint
	// WithoutCloudProvider is a kubelet without --cloud-provider=external: no uninitialized taint, no provided-node-ip.
	WithoutCloudProvider bool
}

// RegisterNode registers a Node that no kubelet stands behind, in the state in which the kubelet of a Talos machine with
// --cloud-provider=external registers it: tainted as uninitialized, with the provided node IPs as annotation and as addresses.
//
// It is one request, sent with [Cluster.KubeletConfig], so that authorization and admission judge it as the kubelet's.
func (c *Cluster) RegisterNode(ctx context.Context, spec NodeSpec) (*corev1.Node, error) {
	config := c.KubeletConfig(spec.Name)
	config.UserAgent = kubelet + "/" + defaulted(spec.KubeletVersion, DefaultKubeletVersion)

	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("register node %s: %w", spec.Name, err)
	}

	node, err := client.CoreV1().Nodes().Create(ctx, spec.node(), metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("register node %s: %w", spec.Name, err)
	}

	return node, nil
}

// KubeletConfig is for requests of the kubelet of a Node: user system:node:<nodename> of group system:nodes. The user is impersonated by the
// administrator: all kubelets of a cluster, thousands as well, share one connection.
func (c *Cluster) KubeletConfig(nodename string) *rest.Config {
	config := c.Config()
	// The API server uses the first part as the field manager, which later conflicts report.
	config.UserAgent = kubelet + "/" + DefaultKubeletVersion
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:node:" + nodename, Groups: []string{groupNodes, "system:authenticated"}}

	return config
}

func (s NodeSpec) node() *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: s.Name, Labels: s.labels(), Annotations: s.annotations()},
		Spec:       corev1.NodeSpec{Taints: s.taints()},
		Status: corev1.NodeStatus{
			Addresses:   s.addresses(),
			Capacity:    capacity(),
			Allocatable: capacity(),
			Conditions:  s.conditions(),
			NodeInfo:    s.nodeInfo(),
		},
	}
}

func (s NodeSpec) hostname() string {
	return defaulted(s.Hostname, s.Name)
}

func (s NodeSpec) labels() map[string]string {
	labels := map[string]string{
		corev1.LabelHostname:      s.hostname(),
		corev1.LabelOSStable:      runtime.GOOS,
		corev1.LabelArchStable:    runtime.GOARCH,
		"beta.kubernetes.io/os":   runtime.GOOS,
		"beta.kubernetes.io/arch": runtime.GOARCH,
	}

	maps.Copy(labels, s.Labels)

	return labels
}

func (s NodeSpec) annotations() map[string]string {
	annotations := map[string]string{"volumes.kubernetes.io/controller-managed-attach-detach": "true"}

	if len(s.NodeIPs) > 0 && !s.WithoutCloudProvider {
		annotations[providedNodeIP] = strings.Join(s.ips(), ",")
	}

	maps.Copy(annotations, s.Annotations)

	return annotations
}

func (s NodeSpec) taints() []corev1.Taint {
	if s.WithoutCloudProvider {
		return s.Taints
	}

	return append(slices.Clone(s.Taints), corev1.Taint{Key: uninitializedTaint, Value: "true", Effect: corev1.TaintEffectNoSchedule})
}

func (s NodeSpec) addresses() []corev1.NodeAddress {
	var addresses []corev1.NodeAddress

	for _, ip := range s.ips() {
		addresses = append(addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip})
	}

	return append(addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: s.hostname()})
}

func (s NodeSpec) ips() []string {
	texts := make([]string, len(s.NodeIPs))
	for i, ip := range s.NodeIPs {
		texts[i] = ip.String()
	}

	return texts
}

// conditions are those of a machine without a CNI: healthy but not Ready, as a Node is when a cloud controller manager first sees it.
func (s NodeSpec) conditions() []corev1.NodeCondition {
	now := metav1.Now()
	condition := func(kind corev1.NodeConditionType, reason, message string) corev1.NodeCondition {
		return corev1.NodeCondition{
			Type: kind, Status: corev1.ConditionFalse, Reason: reason, Message: message,
			LastHeartbeatTime: now, LastTransitionTime: now,
		}
	}

	return []corev1.NodeCondition{
		condition(corev1.NodeMemoryPressure, "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
		condition(corev1.NodeDiskPressure, "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
		condition(corev1.NodePIDPressure, "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
		condition(corev1.NodeReady, "KubeletNotReady", "container runtime network not ready: cni plugin not initialized"),
	}
}

func (s NodeSpec) nodeInfo() corev1.NodeSystemInfo {
	return corev1.NodeSystemInfo{
		OSImage:                 defaulted(s.OSImage, DefaultOSImage),
		KubeletVersion:          defaulted(s.KubeletVersion, DefaultKubeletVersion),
		OperatingSystem:         runtime.GOOS,
		Architecture:            runtime.GOARCH,
		ContainerRuntimeVersion: "containerd://2.2.5",
	}
}

func capacity() corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU:    resource.MustParse("4"),
		corev1.ResourceMemory: resource.MustParse("8Gi"),
		corev1.ResourcePods:   resource.MustParse("110"),
	}
}

func defaulted(value, fallback string) string {
	if value == "" {
		return fallback
	}

	return value
}

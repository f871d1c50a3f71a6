package talostest

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/block"
	"github.com/siderolabs/talos/pkg/machinery/resources/cluster"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
)

// MachineSpec describes a machine after its boot.
type MachineSpec struct {
	// Nodename is the machine's name in Kubernetes and its hostname. It is required and must be unique in the cluster.
	Nodename string
	// Type is worker by default.
	Type machine.Type
	// Address is the listen address of apid, on port 50000; by default the next address of the cluster's block.
	Address netip.Addr
	// Listen listens on a TCP address, such as in a network namespace; by default on the host.
	Listen func(ctx context.Context, address string) (net.Listener, error)
	// NodeIPs are the node IPs of the kubelet; by default only Address.
	NodeIPs []netip.Addr
	// Addresses are additional addresses of the machine.
	Addresses []Address
	// Platform is the platform metadata; the platform is "metal" by default.
	Platform runtime.PlatformMetadataSpec
	// PlatformPending publishes only Platform.Platform, as Talos does until the metadata service answers; see
	// [Machine.ResolvePlatform].
	PlatformPending bool
	// SystemInformation is the SMBIOS data; nil if the machine has none.
	SystemInformation *hardware.SystemInformationSpec
	// LocalhostAdminKubeconfig is published on control-plane machines; if it is empty, the secret does not exist.
	LocalhostAdminKubeconfig string
	// KubeletCertificate is the file with the kubelet's client certificate and its key, in PEM encoding; empty if it does not exist.
	KubeletCertificate []byte
	// Controllers are the values of the extra argument `controllers` of kube-controller-manager on control-plane machines, such as
	// -node-ipam-controller. Talos appends them to its own.
	Controllers []string
	// ServeSocket enables machine.sock; see [Machine.Socket].
	ServeSocket bool
	// Resources are published in addition, such as the machine's PCI devices.
	Resources []resource.Resource
	// UnsupportedTypes are resource types that the machine's Talos version lacks. Requests for them fail with PermissionDenied.
	UnsupportedTypes []resource.Type
}

func (s *MachineSpec) setDefaults() {
	if s.Type == machine.TypeUnknown {
		s.Type = machine.TypeWorker
	}

	if s.Platform.Platform == "" {
		s.Platform.Platform = "metal"
	}

	if len(s.NodeIPs) == 0 {
		s.NodeIPs = []netip.Addr{s.Address}
	}
}

// Machine is a simulated Talos machine. Its methods are safe for concurrent use.
type Machine struct {
	cluster *Cluster
	spec    MachineSpec

	api    *link
	socket *link // nil without machine.sock

	frozen          gate
	delay           atomic.Int64
	certificateTime atomic.Int64 // from which the certificate of apid is valid, as Unix time
	openStreams     atomic.Int64
	lie             atomic.Pointer[Answer]
	kubeletFile     atomic.Pointer[[]byte] // see SetKubeletCertificate
	journal         journal
	power           sync.Mutex // serializes Stop and Start

	mu           sync.Mutex
	memory       *boot
	streams      context.Context //nolint:containedctx // lifetime of the open streams
	breakStreams context.CancelFunc
}

// Nodename returns the nodename with which the machine was added; see [Machine.SetNodename].
func (m *Machine) Nodename() string { return m.spec.Nodename }

// Address returns the listen address of apid.
func (m *Machine) Address() netip.Addr { return m.spec.Address }

// Type returns the machine's type.
func (m *Machine) Type() machine.Type { return m.spec.Type }

// Socket returns the path of machine.sock, which exists with [MachineSpec.ServeSocket].
func (m *Machine) Socket() string { return filepath.Join(m.cluster.dir, m.spec.Nodename+".sock") }

// State returns the machine's resource state without any access policy, for reads and writes. [Machine.Stop] and [Machine.Reboot] replace
// it.
func (m *Machine) State() state.State { return m.currentBoot().state }

// Calls returns the last 128 RPCs that the machine received, oldest first.
func (m *Machine) Calls() []Call { return m.journal.list() }

// Connections returns the number of open connections to apid.
func (m *Machine) Connections() int { return m.api.count() }

// OpenStreams returns the number of open streams, such as watches, of both transports.
func (m *Machine) OpenStreams() int { return int(m.openStreams.Load()) }

func (m *Machine) currentBoot() *boot {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.memory
}

func (m *Machine) streamsContext() context.Context {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.streams
}

// UpdatePlatform changes PlatformMetadata.
func (m *Machine) UpdatePlatform(ctx context.Context, change func(*runtime.PlatformMetadataSpec)) error {
	return modify(ctx, m, runtime.NewPlatformMetadataSpec(runtime.NamespaceName, runtime.PlatformMetadataID), change)
}

// ResolvePlatform publishes the PlatformMetadata of the machine's spec, as Talos does when the metadata service has answered.
func (m *Machine) ResolvePlatform(ctx context.Context) error {
	return m.UpdatePlatform(ctx, func(spec *runtime.PlatformMetadataSpec) { *spec = m.spec.Platform.DeepCopy() })
}

// SetNodename changes the nodename, under which the kubelet registers. The hostname stays.
func (m *Machine) SetNodename(ctx context.Context, nodename string) error {
	return modify(ctx, m, k8s.NewNodename(k8s.NamespaceName, k8s.NodenameID), func(spec *k8s.NodenameSpec) { spec.Nodename = nodename })
}

// SetHostname changes the hostname and the domain name. The nodename stays, but records the version of the hostname.
func (m *Machine) SetHostname(ctx context.Context, hostname, domainname string) error {
	status := network.NewHostnameStatus(network.NamespaceName, network.HostnameID)

	err := modify(ctx, m, status, func(spec *network.HostnameStatusSpec) { spec.Hostname, spec.Domainname = hostname, domainname })
	if err != nil {
		return err
	}

	current, err := m.State().Get(ctx, status.Metadata())
	if err != nil {
		return fmt.Errorf("get hostname of machine %s: %w", m.spec.Nodename, err)
	}

	return modify(ctx, m, k8s.NewNodename(k8s.NamespaceName, k8s.NodenameID), func(spec *k8s.NodenameSpec) {
		spec.HostnameVersion = current.Metadata().Version().String()
	})
}

// SetStage changes the machine's stage. The machine is ready only in stage running.
func (m *Machine) SetStage(ctx context.Context, stage runtime.MachineStage) error {
	return modify(ctx, m, runtime.NewMachineStatus(), func(spec *runtime.MachineStatusSpec) {
		spec.Stage = stage
		spec.Status.Ready = stage == runtime.MachineStageRunning
	})
}

// SetUnmetConditions sets why the machine is not ready in its stage.
func (m *Machine) SetUnmetConditions(ctx context.Context, conditions ...runtime.UnmetCondition) error {
	return modify(ctx, m, runtime.NewMachineStatus(), func(spec *runtime.MachineStatusSpec) {
		spec.Status = runtime.MachineStatusStatus{Ready: len(conditions) == 0, UnmetConditions: conditions}
	})
}

// SetIdentity changes the Talos node ID and the SMBIOS UUID, as if another machine had taken the address.
func (m *Machine) SetIdentity(ctx context.Context, nodeID, uuid string) error {
	identity := cluster.NewIdentity(cluster.NamespaceName, cluster.LocalIdentity)

	if err := modify(ctx, m, identity, func(spec *cluster.IdentitySpec) { spec.NodeID = nodeID }); err != nil {
		return err
	}

	information := hardware.NewSystemInformation(hardware.SystemInformationID)

	return modify(ctx, m, information, func(spec *hardware.SystemInformationSpec) { spec.UUID = uuid })
}

// FormatVolume replaces the file system on the partition with the given label, as Talos does after it was wiped.
func (m *Machine) FormatVolume(ctx context.Context, label, uuid string) error {
	volume := block.NewDiscoveredVolume(block.NamespaceName, "vda-"+label)

	return modify(ctx, m, volume, func(spec *block.DiscoveredVolumeSpec) { spec.PartitionLabel, spec.UUID = label, uuid })
}

// SetNodeIPs changes the node IPs of the kubelet.
func (m *Machine) SetNodeIPs(ctx context.Context, addresses ...netip.Addr) error {
	return modify(ctx, m, k8s.NewNodeIP(k8s.NamespaceName, k8s.KubeletID), func(spec *k8s.NodeIPSpec) {
		spec.Addresses = slices.Clone(addresses)
	})
}

// SetLocalhostAdminKubeconfig creates or replaces the admin kubeconfig of a control-plane machine.
func (m *Machine) SetLocalhostAdminKubeconfig(ctx context.Context, kubeconfig []byte) error {
	return modify(ctx, m, secrets.NewKubernetes(), func(spec *secrets.KubernetesCertsSpec) {
		spec.LocalhostAdminKubeconfig = string(kubeconfig)
	})
}

// SetKubeletCertificate creates or replaces the file with the kubelet's client certificate and its key, in PEM encoding. It does not exist
// if content is empty.
func (m *Machine) SetKubeletCertificate(content []byte) { m.kubeletFile.Store(&content) }

// SetExtensionServiceConfig creates or replaces the files of an extension service. Its environment stays.
func (m *Machine) SetExtensionServiceConfig(ctx context.Context, name string, files ...runtime.ExtensionServiceConfigFile) error {
	return modify(ctx, m, runtime.NewExtensionServiceConfigSpec(runtime.NamespaceName, name), func(spec *runtime.ExtensionServiceConfigSpec) {
		spec.Files = slices.Clone(files)
	})
}

// SetExtensionServiceDocument creates or replaces the whole ExtensionServiceConfig document of an extension service in one write.
func (m *Machine) SetExtensionServiceDocument(ctx context.Context, name string, document runtime.ExtensionServiceConfigSpec) error {
	return modify(ctx, m, runtime.NewExtensionServiceConfigSpec(runtime.NamespaceName, name), func(spec *runtime.ExtensionServiceConfigSpec) {
		*spec = document.DeepCopy()
	})
}

// specified is a resource with a typed spec.
type specified[S any] interface {
	resource.Resource
	TypedSpec() *S
}

// modify changes the spec of a resource, and creates the resource if it does not exist.
func modify[R specified[S], S any](ctx context.Context, m *Machine, empty R, change func(*S)) error {
	err := safe.StateModify(ctx, m.State(), empty, func(res R) error {
		change(res.TypedSpec())

		return nil
	})
	if err != nil {
		return fmt.Errorf("change %s of machine %s: %w", empty.Metadata(), m.spec.Nodename, err)
	}

	return nil
}

// links returns the links of all transports.
func (m *Machine) links() []*link {
	if m.socket == nil {
		return []*link{m.api}
	}

	return []*link{m.api, m.socket}
}

func (m *Machine) close() {
	m.frozen.open()
	m.BreakStreams()

	for _, l := range m.links() {
		l.close()
	}
}

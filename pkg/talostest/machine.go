package talostest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
)

// MachineSpec describes a machine as it is when it has booted.
type MachineSpec struct {
	// Nodename is the machine's name in Kubernetes and its host name. Required, and unique in the cluster.
	Nodename string
	// Type is worker by default.
	Type machine.Type
	// Address is where apid listens, on port 50000; by default the next one of the cluster's block.
	Address netip.Addr
	// NodeIPs are the addresses that the kubelet registers with; by default Address alone.
	NodeIPs []netip.Addr
	// Addresses are further addresses of the machine.
	Addresses []Address
	// ExcludedSubnets have no node IP in them, besides the cluster's pod and service CIDRs.
	ExcludedSubnets []netip.Prefix
	// Platform is what the platform says of the machine; the platform is "metal" by default.
	Platform runtime.PlatformMetadataSpec
	// PlatformPending publishes only Platform.Platform, as Talos does until the metadata service answers; see
	// [Machine.ResolvePlatform].
	PlatformPending bool
	// SystemInformation is the SMBIOS data; nil if the machine has none.
	SystemInformation *hardware.SystemInformationSpec
	// LocalhostAdminKubeconfig is published on control planes. Empty: the secret does not exist yet.
	LocalhostAdminKubeconfig string
	// Controllers are, on control planes, the extra argument `controllers` of kube-controller-manager, which Talos adds to its own: for
	// example -node-ipam-controller.
	Controllers []string
	// ServeSocket serves machine.sock too; see [Machine.Socket].
	ServeSocket bool
	// TalosVersion is v1.13.5 by default.
	TalosVersion string
	// UnsupportedTypes are resource types that this machine's version of Talos does not know. Asking for one is PermissionDenied.
	UnsupportedTypes []resource.Type
}

func (s *MachineSpec) setDefaults() {
	if s.Type == machine.TypeUnknown {
		s.Type = machine.TypeWorker
	}

	if s.Platform.Platform == "" {
		s.Platform.Platform = "metal"
	}

	if s.TalosVersion == "" {
		s.TalosVersion = defaultVersion
	}

	if len(s.NodeIPs) == 0 {
		s.NodeIPs = []netip.Addr{s.Address}
	}
}

// Machine is one Talos machine. Its methods are safe for concurrent use.
type Machine struct {
	cluster     *Cluster
	nodename    string
	address     netip.Addr
	machineType machine.Type
	pending     runtime.PlatformMetadataSpec // what ResolvePlatform publishes
	unsupported []resource.Type

	api        *link
	socket     *link // nil without machine.sock
	socketPath string

	frozen      gate
	openStreams atomic.Int64
	journal     journal
	power       sync.Mutex // serializes Stop and Start
	addressing  sync.Mutex // serializes changes of addresses and what is derived from them

	mu                 sync.Mutex
	memory             *boot
	delay              time.Duration
	certificateExpired bool
	issued             issued
	streams            context.Context //nolint:containedctx // the lifetime of the streams that are open now
	breakStreams       context.CancelFunc
}

// Nodename is the name that the machine was added with; see [Machine.SetNodename].
func (m *Machine) Nodename() string { return m.nodename }

// Address is where apid listens.
func (m *Machine) Address() netip.Addr { return m.address }

// Type is the machine's type.
func (m *Machine) Type() machine.Type { return m.machineType }

// Socket is the path of machine.sock, or empty if the machine serves none.
func (m *Machine) Socket() string { return m.socketPath }

// State is the machine's resource state without any access policy, to read and change everything. It is replaced when the machine
// stops: ask again after [Machine.Stop] or [Machine.Reboot]. Only the resource definitions in namespace meta cannot be changed.
func (m *Machine) State() state.State { return m.currentBoot().state }

// Calls are the last 128 RPCs that the machine was asked for, oldest first.
func (m *Machine) Calls() []Call { return m.journal.list() }

// Connections is how many connections to apid are open.
func (m *Machine) Connections() int { return m.api.count() }

// OpenStreams is how many streams are served now, such as held watches, on both transports.
func (m *Machine) OpenStreams() int { return int(m.openStreams.Load()) }

func (m *Machine) currentBoot() *boot {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.memory
}

func (m *Machine) responseDelay() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.delay
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

// ResolvePlatform publishes the PlatformMetadata of the machine's spec, as when the metadata service answers at last.
func (m *Machine) ResolvePlatform(ctx context.Context) error {
	return m.UpdatePlatform(ctx, func(spec *runtime.PlatformMetadataSpec) { *spec = m.pending.DeepCopy() })
}

// SetNodename changes the name under which the machine's kubelet registers. The host name stays.
func (m *Machine) SetNodename(ctx context.Context, nodename string) error {
	return modify(ctx, m, k8s.NewNodename(k8s.NamespaceName, k8s.NodenameID), func(spec *k8s.NodenameSpec) { spec.Nodename = nodename })
}

// SetHostname changes the host name, and the domain name if there is one. The nodename stays.
func (m *Machine) SetHostname(ctx context.Context, hostname, domainname string) error {
	return modify(ctx, m, network.NewHostnameStatus(network.NamespaceName, network.HostnameID), func(spec *network.HostnameStatusSpec) {
		spec.Hostname = hostname
		spec.Domainname = domainname
	})
}

// SetStage changes the machine's stage; the machine is ready in stage running only.
func (m *Machine) SetStage(ctx context.Context, stage runtime.MachineStage) error {
	return modify(ctx, m, runtime.NewMachineStatus(), func(spec *runtime.MachineStatusSpec) {
		spec.Stage = stage
		spec.Status.Ready = stage == runtime.MachineStageRunning
	})
}

// SetNodeIPs changes the addresses that the kubelet registers with.
func (m *Machine) SetNodeIPs(ctx context.Context, addresses ...netip.Addr) error {
	return modify(ctx, m, k8s.NewNodeIP(k8s.NamespaceName, k8s.KubeletID), func(spec *k8s.NodeIPSpec) {
		spec.Addresses = slices.Clone(addresses)
	})
}

// SetLocalhostAdminKubeconfig publishes or replaces the admin kubeconfig of a control plane.
func (m *Machine) SetLocalhostAdminKubeconfig(ctx context.Context, kubeconfig []byte) error {
	return modify(ctx, m, secrets.NewKubernetes(), func(spec *secrets.KubernetesCertsSpec) {
		spec.LocalhostAdminKubeconfig = string(kubeconfig)
	})
}

// SetExtensionServiceConfig publishes or replaces the files of an extension service. Its environment stays.
func (m *Machine) SetExtensionServiceConfig(ctx context.Context, name string, files ...runtime.ExtensionServiceConfigFile) error {
	return m.modifyExtension(ctx, name, func(spec *runtime.ExtensionServiceConfigSpec) { spec.Files = slices.Clone(files) })
}

// SetExtensionServiceDocument publishes or replaces all that the ExtensionServiceConfig document of an extension service says, in one write.
func (m *Machine) SetExtensionServiceDocument(ctx context.Context, name string, document runtime.ExtensionServiceConfigSpec) error {
	return m.modifyExtension(ctx, name, func(spec *runtime.ExtensionServiceConfigSpec) { *spec = document.DeepCopy() })
}

func (m *Machine) modifyExtension(ctx context.Context, name string, change func(*runtime.ExtensionServiceConfigSpec)) error {
	return modify(ctx, m, runtime.NewExtensionServiceConfigSpec(runtime.NamespaceName, name), change)
}

// specified is a resource with a typed spec.
type specified[S any] interface {
	resource.Resource
	TypedSpec() *S
}

// modify changes the spec of a resource, which it creates if there is none.
func modify[R specified[S], S any](ctx context.Context, m *Machine, empty R, change func(*S)) error {
	err := safe.StateModify(ctx, m.State(), empty, func(res R) error {
		change(res.TypedSpec())

		return nil
	})
	if err != nil {
		return fmt.Errorf("change %s of machine %s: %w", empty.Metadata(), m.nodename, err)
	}

	return nil
}

func (m *Machine) version(ctx context.Context) (string, error) {
	res, err := safe.StateGetByID[*runtime.Version](ctx, m.State(), runtime.NewVersion().Metadata().ID())
	if err != nil {
		return "", fmt.Errorf("read the Talos version of machine %s: %w", m.nodename, err)
	}

	return res.TypedSpec().Version, nil
}

func (m *Machine) platform(ctx context.Context) (string, error) {
	res, err := safe.StateGetByID[*runtime.PlatformMetadata](ctx, m.State(), runtime.PlatformMetadataID)
	if err != nil {
		return "", fmt.Errorf("read the platform of machine %s: %w", m.nodename, err)
	}

	return res.TypedSpec().Platform, nil
}

// serverNames are the subject alternative names of apid: the host names, every address the machine has had, and 127.0.0.1.
func (m *Machine) serverNames() (serverNames, error) {
	ctx := context.Background() // reads memory only

	hostname, err := safe.StateGetByID[*network.HostnameStatus](ctx, m.State(), network.HostnameID)
	if err != nil {
		return serverNames{}, fmt.Errorf("read the host name of machine %s: %w", m.nodename, err)
	}

	list := network.FilteredNodeAddressID(network.NodeAddressAccumulativeID, k8s.NodeAddressFilterNoK8s)

	addresses, err := safe.StateGetByID[*network.NodeAddress](ctx, m.State(), list)
	if err != nil {
		return serverNames{}, fmt.Errorf("read the node addresses of machine %s: %w", m.nodename, err)
	}

	names := serverNames{fqdn: hostname.TypedSpec().FQDN(), dns: hostname.TypedSpec().DNSNames()}

	for _, addr := range append(addresses.TypedSpec().IPs(), netip.MustParseAddr("127.0.0.1")) {
		names.ips = append(names.ips, net.IP(addr.AsSlice()))
	}

	return names, nil
}

// links are the machine's ways in.
func (m *Machine) links() []*link {
	if m.socket == nil {
		return []*link{m.api}
	}

	return []*link{m.api, m.socket}
}

func (m *Machine) close() {
	m.frozen.open()
	m.BreakStreams()

	for _, way := range m.links() {
		way.close()
	}
}

// errNoNodename refuses a spec without a name.
var errNoNodename = errors.New("a machine needs a nodename")

package talosapi_test

import (
	"context"
	"encoding/pem"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/crypto/x509"
	generated "github.com/siderolabs/talos/pkg/machinery/config/generate/secrets"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/reflector"
	"github.com/talos-ccm/talos-ccm/pkg/talosapi"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

func nodenamePointer() resource.Pointer {
	return k8s.NewNodename(k8s.NamespaceName, k8s.NodenameID).Metadata()
}

func TestSocket_ReaderCannotReadSecrets(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	requireNodename(t, s.socket.Reader, s.controlPlane.Nodename())

	_, err := s.socket.Reader.Get(t.Context(), secrets.NewKubernetes().Metadata())
	assert.Equal(t, codes.PermissionDenied, status.Code(err), err)
}

func TestAdmin_GetsAndWatchesLocalhostAdminKubeconfig(t *testing.T) {
	s := newSite(t, clock.RealClock{})

	kubeconfig, err := s.socket.Admin.LocalhostAdminKubeconfig(t.Context())
	require.NoError(t, err)
	require.Equal(t, "first", string(kubeconfig))

	events := make(chan state.Event)
	require.NoError(t, s.socket.Admin.WatchLocalhostAdminKubeconfig(t.Context(), events))
	requireKubeconfig(t, events, "first")

	require.NoError(t, s.controlPlane.SetLocalhostAdminKubeconfig(t.Context(), []byte("second")))
	requireKubeconfig(t, events, "second")
}

func requireKubeconfig(t *testing.T, events <-chan state.Event, want string) {
	t.Helper()

	certs, ok := ctest.Receive(t, events, "an event is received").Resource.(*secrets.Kubernetes)
	require.True(t, ok)
	require.Equal(t, want, certs.TypedSpec().LocalhostAdminKubeconfig)
}

// kubeletCertificate returns the certificate of a CA, and what a kubelet writes: a certificate of that CA and its key.
func kubeletCertificate(t *testing.T) (authority, certificate, key []byte) {
	t.Helper()

	ca, err := generated.NewKubernetesCA(time.Now(), nil)
	require.NoError(t, err)

	pair, err := x509.NewKeyPair(ca, x509.CommonName("system:node:cp-1"))
	require.NoError(t, err)

	return ca.CrtPEM, pair.CrtPEM, pair.KeyPEM
}

func TestAdmin_ReadsKubeletCertificate(t *testing.T) {
	s := newSite(t, clock.RealClock{})

	_, err := s.socket.Admin.KubeletCertificate(t.Context())
	assert.Equal(t, codes.NotFound, status.Code(err), err)

	authority, certificate, key := kubeletCertificate(t)
	content := slices.Concat(certificate, key)
	block, _ := pem.Decode(certificate)

	for name, file := range map[string][]byte{
		"certificate and key": content, "key and certificate": slices.Concat(key, certificate), "CA first": slices.Concat(authority, content),
		"text around": slices.Concat([]byte("text\n"), content, []byte("text\n")), "as long as allowed": slices.Concat(content, make([]byte, 64<<10-len(content))),
	} {
		s.controlPlane.SetKubeletCertificate(file)

		read, err := s.socket.Admin.KubeletCertificate(t.Context())
		require.NoError(t, err, name)
		assert.Equal(t, block.Bytes, read.Raw, name)
	}

	for name, file := range map[string][]byte{
		"key only": key, "CA only": authority, "cut off": content[:200], "too long": slices.Concat(content, make([]byte, 64<<10+1-len(content))),
	} {
		s.controlPlane.SetKubeletCertificate(file)

		_, err := s.socket.Admin.KubeletCertificate(t.Context())
		require.ErrorContains(t, err, "/var/lib/kubelet/pki/kubelet-client-current.pem", name)
		assert.NotContains(t, err.Error(), "PRIVATE", name)
	}
}

func TestAdmin_FailsOnWorker(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	worker := openSocket(t, s.worker)

	_, err := worker.Admin.LocalhostAdminKubeconfig(t.Context())
	assert.True(t, state.IsNotFoundError(err), err)

	_, err = worker.Admin.IssueReader(t.Context(), time.Hour)
	assert.Equal(t, codes.Unimplemented, status.Code(err), err)
}

func TestSocket_ListsEtcdMembers(t *testing.T) {
	s := newSite(t, clock.RealClock{})

	_, err := s.socket.EtcdMembers(t.Context())
	assert.Equal(t, codes.Unavailable, status.Code(err), err)

	want := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::2")}
	s.cluster.SetEtcdMembers(want...)

	got, err := s.socket.EtcdMembers(t.Context())
	assert.NoError(t, err)
	assert.Equal(t, want, got)

	_, err = openSocket(t, s.worker).EtcdMembers(t.Context())
	assert.Equal(t, codes.Unimplemented, status.Code(err), err)
}

// TestSocket_UsesAdminRoleOnlyInNamedCalls checks the roles of all calls of a process that issues certificates, follows
// both machines and reads the admin kubeconfig.
func TestSocket_UsesAdminRoleOnlyInNamedCalls(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	issued := s.issue(t, clock.RealClock{})

	_, err := s.socket.Admin.LocalhostAdminKubeconfig(t.Context())
	require.NoError(t, err)
	require.NoError(t, s.socket.Admin.WatchLocalhostAdminKubeconfig(t.Context(), make(chan state.Event, 1)))

	_, err = s.socket.Admin.KubeletCertificate(t.Context())
	require.Error(t, err)
	s.followAll(t, issued)

	var admin []talostest.Call

	for _, call := range append(s.controlPlane.Calls(), s.worker.Calls()...) {
		switch {
		case slices.Equal(call.Roles, []string{string(role.Reader)}):
		case call.Transport == talostest.TransportSocket && slices.Equal(call.Roles, []string{string(role.Admin)}):
			admin = append(admin, talostest.Call{Method: call.Method, ResourceType: call.ResourceType})
		default:
			t.Errorf("unexpected roles in call %+v", call)
		}
	}

	assert.Equal(t, []talostest.Call{
		{Method: "/machine.MachineService/GenerateClientConfiguration"},
		{Method: "/cosi.resource.State/Get", ResourceType: secrets.KubernetesType},
		{Method: "/cosi.resource.State/Watch", ResourceType: secrets.KubernetesType},
		{Method: "/machine.MachineService/Read"},
	}, admin)
}

// followAll follows the control-plane machine over its socket and the worker over the network until both are current.
func (s *site) followAll(t *testing.T, issued *talosapi.IssuedCredentials) {
	t.Helper()

	inv := inventory.New(time.Now)
	refl := reflector.New(inv, func(ctx context.Context, nodename string, addr netip.Addr) (talosapi.State, error) {
		if nodename == s.controlPlane.Nodename() {
			return talosapi.DialSocket(s.controlPlane.Socket())
		}

		return talosapi.Dial(ctx, issued, addr)
	}, clock.RealClock{})

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})

	go func() {
		defer close(done)

		refl.Run(ctx)
	}()

	for _, m := range s.cluster.Machines() {
		refl.Track(m.Nodename(), []netip.Addr{m.Address()}, reflector.Unknown)
	}

	ctest.Eventually(t, "both machines are current", func() bool { return inv.Count(inventory.Current) == 2 })
	cancel()
	ctest.Receive(t, done, "the reflector stops")
}

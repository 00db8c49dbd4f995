//! Authentication, users and ACLs.

use super::*;

pub(super) fn body(key: ApiKey, version: i16, world: &World) -> Option<Bytes> {
    let from = |first: i16| version >= first;
    Some(match key {
        ApiKey::SaslHandshake => {
            encode(&SaslHandshakeRequest::default().with_mechanism(text("PLAIN")), version)
        }
        ApiKey::SaslAuthenticate => {
            let message = Bytes::from_static(b"\0user\0password");
            encode(&SaslAuthenticateRequest::default().with_auth_bytes(message), version)
        }
        ApiKey::DescribeUserScramCredentials => {
            use describe_user_scram_credentials_request::*;
            let user = UserName::default().with_name(text("absent"));
            let request = DescribeUserScramCredentialsRequest::default();
            encode(&request.with_users(Some(vec![user])), version)
        }
        ApiKey::AlterUserScramCredentials => {
            use alter_user_scram_credentials_request::*;
            let deletion = ScramCredentialDeletion::default()
                .with_name(text(&format!("not-{}", world.unique)))
                .with_mechanism(1);
            let upsertion = ScramCredentialUpsertion::default()
                .with_name(text(&world.unique))
                .with_mechanism(2)
                .with_iterations(4096)
                .with_salt(Bytes::from_static(b"salt"))
                .with_salted_password(Bytes::from_static(b"salted"));
            let request = AlterUserScramCredentialsRequest::default()
                .with_deletions(vec![deletion])
                .with_upsertions(vec![upsertion]);
            encode(&request, version)
        }
        ApiKey::DescribeAcls => {
            let request = DescribeAclsRequest::default()
                .with_resource_type_filter(2)
                .with_resource_name_filter(Some(text(world.topic)))
                .with_pattern_type_filter(3)
                .with_principal_filter(Some(text("User:alice")))
                .with_host_filter(Some(text("*")))
                .with_operation(1)
                .with_permission_type(1);
            encode(&request, version)
        }
        ApiKey::CreateAcls => {
            use create_acls_request::*;
            let acl = AclCreation::default()
                .with_resource_type(2)
                .with_resource_name(text(world.topic))
                .with_resource_pattern_type(if from(1) { 4 } else { 3 })
                .with_principal(text("User:alice"))
                .with_host(text("*"))
                .with_operation(3)
                .with_permission_type(3);
            encode(&CreateAclsRequest::default().with_creations(vec![acl]), version)
        }
        ApiKey::DeleteAcls => {
            use delete_acls_request::*;
            let filter = DeleteAclsFilter::default()
                .with_resource_type_filter(2)
                .with_resource_name_filter(None)
                .with_pattern_type_filter(1)
                .with_principal_filter(Some(text("User:absent")))
                .with_host_filter(None)
                .with_operation(1)
                .with_permission_type(1);
            encode(&DeleteAclsRequest::default().with_filters(vec![filter]), version)
        }
        _ => return None,
    })
}
